"""Batched products on a GPU: cuBLAS, and the grouped kernels, for which each head is an expert.

All launches read the same matrices, as in an article on L2 (figures/articles.py).
"""

from collections.abc import Iterator, Mapping

import torch

from dakrun.formats import WeightFormat
from dakrun.geometry import ROWS_PER_BLOCK, SPLITK_X_TILES, UNIT_COLS
from dakrun.hardware import LOCAL, Card
from dakrun.kernels.experts import grouped_splitk, grouped_tiled
from dakrun.kernels.runtime import architecture, compile_ahead
from dakrun.lab.chain import Launch
from dakrun.lab.evaluate.cases import STORED
from dakrun.lab.evaluate.points import BatchPoint
from dakrun.launches import (
    MAX_EXPERTS,
    TierAccess,
    expert_splits,
    grouped_config,
    grouped_launch,
    grouped_shape,
    splitk_rows,
)
from dakrun.memory.matrix import MatrixPart, TieredMatrix

DTYPE = torch.float16
LAUNCHES = 64  # of the chain of which a longer one is made
PIECE = 1 << 24  # elements to write at a time
ACCESS = (TierAccess(),)


def compile_all(card: Card, device: torch.device) -> None:
    """Compile the kernels of all batched products."""
    compile_ahead(_variants(card), architecture(device.index))


def _variants(card: Card) -> Iterator[tuple[str, Mapping[str, int]]]:
    for stored in STORED.values():
        for tiles in SPLITK_X_TILES:
            if 8 * tiles <= splitk_rows(stored.atom_bytes):
                macros = grouped_splitk.defines(DTYPE, tiles, "stored")
                yield grouped_splitk.SOURCE, {**macros, **stored.macros}
        if shape := grouped_shape(card, stored.atom_bytes):
            macros = grouped_tiled.defines(DTYPE, shape)
            yield grouped_tiled.SOURCE, {**macros, **stored.macros}


def launch_of(point: BatchPoint, card: Card, device: torch.device) -> Launch:
    """Launches of the product of random numbers."""
    x = torch.randn(point.heads * point.n, point.cols, dtype=DTYPE, device=device)
    out = x.new_empty(len(x), point.rows)
    if point.by == "cublas":
        scale = point.cols**-0.5
        weight = scale * x.new_empty(point.heads, point.cols, point.rows).normal_()
        rows, y = (of.view(point.heads, point.n, -1) for of in (x, out))
        return lambda number: torch.bmm(rows, weight, out=y)
    return multiplied(point, x, out, card)


def multiplied(point: BatchPoint, x: torch.Tensor, out: torch.Tensor, card: Card) -> Launch:
    """Launches of the kernel `point.by` with random matrices: out [heads n, rows] of x."""
    most = MAX_EXPERTS if point.by == "splitk" else point.heads
    stored, parts = STORED[point.bits], []
    for first in range(0, point.heads, most):
        heads = min(most, point.heads - first)
        weight = _matrices(heads, point, card, x.device)
        ends = point.n * torch.arange(1, heads + 1, dtype=torch.int32, device=x.device)
        rows = slice(point.n * first, point.n * (first + heads))
        parts.append((x[rows], ends, weight, out[rows]))
    if point.by == "tiled":
        (x, ends, weight, out), counters = parts[0], grouped_tiled.tile_counters(x.device)
        shape = grouped_launch(
            len(x), point.heads, [weight.parts[0].split.row_blocks], ACCESS, card=card,
            atom_bytes=stored.atom_bytes,
        )  # fmt: skip
        return lambda number: grouped_tiled.grouped_tiled_gemm(
            x, ends, weight, shape, out, counters=counters, listed=True, pdl=True
        )
    configs = [
        grouped_config(
            len(x), [weight.parts[0].split], ACCESS, experts=len(ends), top_k=1, card=card,
            atom_bytes=stored.atom_bytes, spread=1,
            one_unit=bool(stored.macros) and point.cols <= UNIT_COLS,
        )
        for x, ends, weight, _ in parts
    ]  # fmt: skip

    def launch(number: int) -> None:
        for (x, ends, weight, out), config in zip(parts, configs, strict=True):
            grouped_splitk.multiply(x, ends, weight, config, out, pdl=True)

    return launch


def _matrices(heads: int, point: BatchPoint, card: Card, device: torch.device) -> TieredMatrix:
    """Random matrices of `heads`, one after the other."""
    stored, rows, cols = STORED[point.bits], heads * point.rows, point.cols
    height = point.rows // ROWS_PER_BLOCK
    splits = expert_splits([heads * height], expert_row_blocks=height, top_k=heads, card=card)
    arrays = tuple(
        torch.empty(array.nbytes(rows), dtype=torch.uint8, device=device)
        for array in stored.arrays(cols)
    )
    weight = TieredMatrix((rows, cols), DTYPE, (MatrixPart(LOCAL, splits[0], stored, arrays),))
    tensors = _random(stored, rows, cols, device)
    for piece in weight.pieces(PIECE):
        piece.write(*(tensor[piece.rows] for tensor in tensors))
    return weight


def _random(
    stored: WeightFormat, rows: int, cols: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """What the format stores, of values whose products have the scale of X."""
    if not stored.macros:
        return (cols**-0.5 * torch.randn(rows, cols, dtype=DTYPE, device=device),)
    codes = torch.randint(16, (rows, cols), dtype=torch.uint8, device=device)
    scales = torch.rand(rows, -(-cols // 128), dtype=DTYPE, device=device) + 0.5
    return codes, cols**-0.5 / 5 * scales
