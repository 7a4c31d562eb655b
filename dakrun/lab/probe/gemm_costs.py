"""Costs of products in decode steps: of few rows, of many, with a norm before, with staging.

Chains of launches in CUDA graphs over random weights in the HBM buffer. Knows no profiles.
"""

import itertools
import statistics
from collections.abc import Sequence

import torch

from dakrun.engine import Staging, staged_bytes
from dakrun.formats import PACKED16, Quantised, WeightFormat
from dakrun.geometry import FEW_ROWS, ROWS_PER_BLOCK
from dakrun.hardware import LOCAL, Card, Sweep
from dakrun.kernels import normalize
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.gemm.splitk import splitk_gemm
from dakrun.lab.chain import Launch, graph_seconds, launch_seconds, seconds_round_robin
from dakrun.lab.probe.effort import Effort
from dakrun.lab.probe.sweeps import Bench, rounded
from dakrun.lab.samples import spread
from dakrun.launches import (
    TierAccess,
    few_rows,
    gemm_config,
    kernel_for,
    split_row_blocks,
    tiled_config,
)
from dakrun.memory.matrix import MatrixPart, TieredMatrix

DTYPE = torch.float16
ACCESS = (TierAccess(),)
CHAIN_BYTES = 2**31  # maximum bytes of a chain's operands; far more than L2 holds
EPS = 1e-5
NOISE_SECONDS = 1e-8  # the noise floor of a difference of two times
COLUMNS = ("n", "op_bytes", "op_s", "bytes_per_s", "spread")
Product = tuple[tuple[Launch, int], int]  # a chain and its operands, and the bytes of each

# Weights as (row blocks, columns). Few rows: 32 and 392 MiB. Many rows: weights of 7B and 30B
# models, whose tiles fill the SMs more and less evenly.
FEW_ROWS_WEIGHTS = (512, 4096), (3584, 7168)
MANY_ROWS_WEIGHTS = (
    (512, 4096), (768, 4096), (2048, 4096), (3584, 4096), (512, 16384), (896, 7168), (2688, 7168),
    (3584, 7168),
)  # fmt: skip
RATE_WEIGHT = 1024, 8192

# Weights as (row blocks, columns): quantized ones also of long rows, of which kernels for many rows
# have few tiles. Formats are those of most checkpoints.
QUANTIZED_WEIGHTS = (*FEW_ROWS_WEIGHTS, (512, 14336))
QUANTIZED_FORMATS = {
    layout.kind: layout
    for layout in (
        Quantised("int4", 128),
        Quantised("int4", 128, zeros=True),
        Quantised("e2m1", 16, 1),
        Quantised("e4m3", 128, 4),
    )
}
# Rows of X that are a tile of SplitK_GEMM, two of them, and one of the tiled GEMM.
QUANTIZED_ROWS = 8, 16, 64

# Norms. With few rows (True) the product normalizes X; its weight is of a layer's size, as a larger
# one would hide the norm. With more (False) the norm is a separate launch before a small product.
NORM_COLS = 4096, 8192
NORM_ROW_BLOCKS = {False: 64, True: 768}
NORM_BYTES = 2**26  # all weights of the small products together; L2 may hold them

# Staging: a weight of 96 MiB, of which a few row blocks are copied while earlier ops read HBM.
WEIGHT_ROW_BLOCKS, WEIGHT_COLS = 1536, 4096
STAGED_ROW_BLOCKS = 8
STAGED_ROWS = 8  # rows of X
STAGED_ACCESS = TierAccess(), TierAccess(1)
STAGING_BUFFERS = 2  # the ring's size, in staged parts
MAX_STAGED_OPS = 64


def linear_sweep(bench: Bench) -> Sweep:
    """Products of few rows by rows of X and bytes of a weight; each launch reads another weight.

    A weight that exceeds the buffer is replaced by the largest that fits, here and in all other
    sweeps.
    """
    memory, rows = random_memory(bench), []
    for n, (row_blocks, cols) in itertools.product(bench.effort.rows, FEW_ROWS_WEIGHTS):
        chain, size = product(bench, memory, row_blocks, random(memory, n, cols))
        rows.append(row(n, size, launch_seconds(*chain, replays=bench.effort.runs)))
    return rounded(COLUMNS, rows)


def quantized_sweep(bench: Bench, stored: Quantised) -> Sweep:
    """Products of few rows, and of every other number of many, with weights of few bits."""
    rows = quantized_rows(bench.effort, bench.card)
    return _in_turns(bench, rows, QUANTIZED_WEIGHTS, stored, load_above=max(QUANTIZED_ROWS))


def quantized_rows(effort: Effort, card: Card) -> tuple[int, ...]:
    """Rows of X of products with quantized weights."""
    return (*QUANTIZED_ROWS, *many_rows(effort, card)[1::2])


def quantized_tiles(effort: Effort, card: Card, stored: Quantised) -> set[tuple[int, bool]]:
    """The variants of the tiled GEMM that quantized_sweep launches: tiles of X, and whether wide.

    A buffer too small for all weights may need other variants too.
    """
    every = itertools.product(quantized_rows(effort, card), QUANTIZED_WEIGHTS)
    size = stored.atom_bytes
    return {
        (launch.shape.tiles, launch.shape.wide)
        for n, (row_blocks, cols) in every
        if kernel_for(n, row_blocks, cols, remote=False, card=card, atom_bytes=size) == "tiled"
        for config in [tiled_config(n, [row_blocks], ACCESS, cols=cols, card=card, atom_bytes=size)]
        for launch in config.launches
    }


def many_rows(effort: Effort, card: Card) -> tuple[int, ...]:
    """The effort's numbers of rows of X that are too many for SplitK_GEMM."""
    most = few_rows(card)
    return tuple(n for n in effort.many_rows if n > most)


def many_rows_sweep(bench: Bench) -> Sweep:
    """Products of many rows by rows of X and bytes of a weight."""
    rows = many_rows(bench.effort, bench.card)
    return _in_turns(bench, rows, MANY_ROWS_WEIGHTS, PACKED16, load_above=0)


def _in_turns(
    bench: Bench, counts: Sequence[int], weights: Sequence[tuple[int, int]], stored: WeightFormat,
    *, load_above: int,
) -> Sweep:  # fmt: skip
    """Products of each number of rows in `counts` with `weights`, `stored` in a format.

    For each number of rows, chains of all weights are replayed round-robin; of more rows than
    `load_above` under load: large products draw more power than a GPU sustains, and its clocks drop
    after some tenths of a second.
    """
    memory, rows = random_memory(bench), []
    for n in counts:
        products = [product(bench, memory, row_blocks, random(memory, n, cols), stored=stored)
                    for row_blocks, cols in weights]  # fmt: skip
        chains, sizes = zip(*products, strict=True)
        times = seconds_round_robin(chains, replays=bench.effort.runs, load=n > load_above)
        rows += [row(n, size, seconds) for size, seconds in zip(sizes, times, strict=True)]
    return rounded(COLUMNS, rows)


def product_rates(bench: Bench, n: int) -> list[float]:
    """FLOP/s of products of `n` rows of X and one large weight after the other."""
    memory, (row_blocks, cols) = random_memory(bench), RATE_WEIGHT
    chain, size = product(bench, memory, row_blocks, random(memory, n, cols))
    flops = 2.0 * n * size / DTYPE.itemsize
    return [flops / s for s in launch_seconds(*chain, replays=bench.effort.runs)]


def norm_sweep(bench: Bench) -> Sweep:
    """Seconds that a norm of X adds to a product, by rows and bytes of X.

    Bytes of X count twice: they are read and written. The spread is over the time of both, since
    what a norm adds to a product of few rows is about nothing.
    """
    memory, rows = random_memory(bench), []
    counts = (*bench.effort.rows, *many_rows(bench.effort, bench.card))
    for n, cols in itertools.product(counts, NORM_COLS):
        x, few = random(memory, n, cols), n <= FEW_ROWS
        row_blocks, weights = NORM_ROW_BLOCKS[few], memory if few else memory[:NORM_BYTES]
        chains = [f(bench, weights, row_blocks, x)[0] for f in (normed_product, product)]
        more, less = seconds_round_robin(chains, replays=bench.effort.runs, load=False)
        added = [max(a - b, NOISE_SECONDS) for a, b in zip(more, less, strict=True)]
        rows.append(row(n, 2 * x.nbytes, added, of=more))
    return rounded(COLUMNS, rows)


def staged_seconds(bench: Bench, remote: torch.Tensor) -> list[float]:
    """Seconds that staging adds to each product of a chain whose copies take less than a product.

    A product of a staged weight launches without PDL, after its copy has ended.
    """
    splits = split_row_blocks(
        [WEIGHT_ROW_BLOCKS - STAGED_ROW_BLOCKS, STAGED_ROW_BLOCKS], STAGED_ACCESS, card=bench.card
    )
    config = gemm_config(STAGED_ROWS, list(splits), STAGED_ACCESS, card=bench.card)
    row_block, memory = PACKED16.row_block_bytes(WEIGHT_COLS), random_memory(bench)
    x = random(memory, STAGED_ROWS, WEIGHT_COLS)
    out = x.new_empty(STAGED_ROWS, WEIGHT_ROW_BLOCKS * ROWS_PER_BLOCK)
    whole = pieces(memory, WEIGHT_ROW_BLOCKS * row_block)[:MAX_STAGED_OPS]
    remote_parts = pieces(remote, STAGED_ROW_BLOCKS * row_block)

    def matrices(second: Sequence[torch.Tensor]) -> dict[str, TieredMatrix]:
        first_bytes = (WEIGHT_ROW_BLOCKS - STAGED_ROW_BLOCKS) * row_block
        found = {}
        for number, data in enumerate(whole):
            arrays = (data[:first_bytes],), (second[number % len(second)],)
            parts = map(MatrixPart, (LOCAL, "remote"), splits, [PACKED16] * 2, arrays)
            found[str(number)] = TieredMatrix((out.shape[1], WEIGHT_COLS), DTYPE, tuple(parts))
        return found

    resident = matrices([data[-STAGED_ROW_BLOCKS * row_block :] for data in whole])
    offloaded = matrices(remote_parts)
    sizes = [staged_bytes(weight) for weight in offloaded.values()]
    ring = torch.empty(STAGING_BUFFERS * max(sizes), dtype=torch.uint8, device=memory.device)
    staged = Staging(offloaded, list(offloaded), ring, together=1)  # each is waited for
    staged.fill()

    def staging() -> None:
        staged.begin()
        for name in resident:
            pdl = not staged.waits(name)
            splitk_gemm(x, staged.fetch(name), config, out, pdl=pdl)
            staged.release(name)
        staged.end()

    def resident_only() -> None:
        for weight in resident.values():
            splitk_gemm(x, weight, config, out, pdl=True)

    more, less = (graph_seconds(step, bench.effort.runs) for step in (staging, resident_only))
    return [(a - b) / len(resident) for a, b in zip(more, less, strict=True)]


def product(
    bench: Bench, memory: torch.Tensor, row_blocks: int, x: torch.Tensor, *, norm: bool = False,
    pdl: bool = True, stored: WeightFormat = PACKED16,
) -> Product:  # fmt: skip
    """A chain of x [N, K] times one of the weights in `memory` after the other.

    Each weight has `row_blocks`, or as many as fit, `stored` in a format that kernels read. With
    `norm` the kernel also normalizes x, of up to FEW_ROWS rows.
    """
    n, cols = x.shape
    row_bytes = stored.row_block_bytes(cols)
    row_blocks = min(row_blocks, memory.numel() // row_bytes)
    (split,) = split_row_blocks([row_blocks], ACCESS, card=bench.card, atom_bytes=stored.atom_bytes)
    out = x.new_empty(n, ROWS_PER_BLOCK * row_blocks)
    weights = [
        TieredMatrix((out.shape[1], cols), DTYPE, (MatrixPart(LOCAL, split, stored, (data,)),))
        for data in pieces(memory, row_blocks * row_bytes)
    ]
    products = Products(x.device, bench.card)

    def launch(number: int) -> None:
        following = weights[(number + 1) % len(weights)]
        products(
            x, weights[number], ACCESS, out, norm="layer" if norm else "none", eps=EPS,
            pdl=pdl, ahead=products.ahead(n, following, ACCESS),
        )  # fmt: skip

    return (launch, len(weights)), row_blocks * row_bytes


def normed_product(bench: Bench, memory: torch.Tensor, row_blocks: int, x: torch.Tensor) -> Product:
    """Like `product`, with a norm of x before each product, as in a decode step.

    The kernel for up to FEW_ROWS rows normalizes x itself; more rows need a launch of `normalize`.
    Where torch multiplies many rows, products launch without PDL.
    """
    few = len(x) <= FEW_ROWS
    pdl = len(x) <= max(FEW_ROWS, bench.card.tiled_rows)
    (launch, count), size = product(bench, memory, row_blocks, x, norm=few, pdl=pdl)

    def both(number: int) -> None:
        normalize(x, x, "layer", eps=EPS, pdl=True)
        launch(number)

    return (launch if few else both, count), size


def random_memory(bench: Bench) -> torch.Tensor:
    """The first CHAIN_BYTES of the HBM buffer, filled with normal values: uint8 [bytes]."""
    memory = bench.hbm[:CHAIN_BYTES]
    block = random(memory, 2**25)
    for part in memory.view(DTYPE).split(len(block)):
        part.copy_(block[: len(part)])
    return memory


def random(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Normal values of DTYPE on the device of `like`."""
    return torch.randn(shape, dtype=DTYPE, device=like.device)


def pieces(memory: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """All whole pieces of `size` bytes."""
    return memory[: memory.numel() // size * size].split(size)


def row(
    n: int, nbytes: int, seconds: Sequence[float], *, of: Sequence[float] | None = None
) -> tuple[float, ...]:
    """A row of a sweep with COLUMNS; the spread of `seconds` is over their median, or that `of`."""
    op = statistics.median(seconds)
    return n, nbytes, op, nbytes / op, spread(seconds, of=of)
