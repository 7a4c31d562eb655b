"""Products of few rows with the experts that they chose (native/grouped_splitk.cu).

Knows operands and a launch configuration, no models and no plans. reference.py has the same in
plain torch.
"""

import ctypes
from dataclasses import dataclass
from functools import partial

import torch

from dakrun.formats import WeightFormat
from dakrun.geometry import MAX_TIERS, ROWS_PER_BLOCK, SPLITK_THREADS, SPLITK_X_TILES
from dakrun.kernels.experts.route import Routed
from dakrun.kernels.gemm.packed_matrix import addresses, atom_count, check_stacked
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import CtaOrder, ints, pointers
from dakrun.launches import (
    EXPERT_CHUNK_ROWS,
    MAX_EXPERTS,
    GroupedConfig,
    grouped_tiles,
    splitk_rows,
)
from dakrun.memory.matrix import TieredMatrix

SOURCE = "grouped_splitk.cu"


class _Tier(ctypes.Structure):
    """GroupedTier of native/grouped_splitk.cuh."""

    _fields_ = (*ints("first_row_block", "first_cta", "group_row_blocks", "window"),)


class _Args(ctypes.Structure):
    """GroupedSplitKArgs of native/grouped_splitk.cuh."""

    _fields_ = (
        *pointers("addresses", "shifts", "ends"),
        *ints("tier_count", "experts", "expert_row_blocks", "k", "atoms"),
        *ints("stages", "stage_row_blocks", "top_k"),
        ("order", CtaOrder),
        *pointers("x", "tokens", "weights", "places", "y", "partials", "arrivals"),
        ("tiers", _Tier * (MAX_TIERS + 1)),
    )


@dataclass(frozen=True)
class PairSums:
    """What adding up the experts of up to N rows needs, k each: for all launches of a stream.

    `partials` is float32 [N k, M], `arrivals` int32 [N, M / 8], zero between launches.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, rows: int, top_k: int, m: int, device: torch.device | str) -> "PairSums":
        """Allocate it for up to `rows` rows and matrices of `m` rows."""
        return cls(
            torch.empty(rows * top_k, m, dtype=torch.float32, device=device),
            torch.zeros(rows, m // ROWS_PER_BLOCK, dtype=torch.int32, device=device),
        )


def gate_up(
    x: torch.Tensor,
    routed: Routed,
    weight: TieredMatrix,
    config: GroupedConfig,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """out [pairs, M / 2] = silu(gate) * up of each pair that `routed` has of x [N, K].

    `weight` [E M, K] stacks the experts' matrices; even rows are gates, odd rows ups. It is stored
    expert after expert (launches.expert_splits). With `pdl` the launch may start before
    its predecessor ends; it waits for it before it lets its own successor start.
    Raises ValueError if an operand does not fit the others.
    """
    n, m = len(x), weight.shape[0] // len(routed.ends)
    return _launch(x, (n, weight.shape[1]), routed, weight, config, out, n, m // 2, None, pdl=pdl)


def down(
    x: torch.Tensor,
    routed: Routed,
    weight: TieredMatrix,
    config: GroupedConfig,
    out: torch.Tensor,
    sums: PairSums,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Add to out [N, M] each row's experts, weighted, of x [pairs, K], in the order of experts.

    `weight` [E M, K] is stored as in gate_up(). With `pdl` the launch may start before its
    predecessor ends, which must be gate_up() with the same `routed`: it reads the experts that were
    chosen, and their weights, meanwhile.
    Raises ValueError if an operand does not fit the others.
    """
    n, m = len(out), weight.shape[0] // len(routed.ends)
    return _launch(x, (len(x), weight.shape[1]), routed, weight, config, out, n, m, sums, pdl=pdl)


def _launch(
    x: torch.Tensor,
    x_shape: tuple[int, int],
    routed: Routed,
    weight: TieredMatrix,
    config: GroupedConfig,
    out: torch.Tensor,
    n: int,
    width: int,
    sums: PairSums | None,
    *,
    pdl: bool,
) -> torch.Tensor:
    """Launch the kernel for `n` rows; with `sums` it adds up."""
    (all_rows, k), experts, top_k = weight.shape, len(routed.ends), routed.places.shape[1]
    m, pairs = all_rows // experts, n * top_k
    if all_rows % (experts * ROWS_PER_BLOCK) or experts > MAX_EXPERTS:
        raise ValueError(
            f"expected up to {MAX_EXPERTS} experts of whole row blocks, got {all_rows} rows of "
            f"{experts} experts"
        )
    wanted: dict[str, operands.Wanted] = {
        "x": (x, x_shape, weight.dtype),
        "out": (out, (len(out), width), weight.dtype),
    }
    if sums is not None:
        shapes = (len(sums.partials), m), (len(sums.arrivals), m // ROWS_PER_BLOCK)
        wanted["partials"] = sums.partials, shapes[0], torch.float32
        wanted["arrivals"] = sums.arrivals, shapes[1], torch.int32
    operands.check_operands(x.device, wanted)
    check_stacked(weight, experts)
    rooms = [len(routed.places), len(routed.tokens) // top_k]
    rooms += [len(out) // top_k] if sums is None else [len(x) // top_k]
    rooms += [] if sums is None else [len(sums.partials) // top_k, len(sums.arrivals)]
    if min(rooms) < n:
        raise ValueError(f"expected room for the {pairs} pairs of {n} rows, got it for {rooms}")
    operands.check_gpu(x.device)
    args = _Args(
        addresses=addresses(weight, x.device),
        shifts=operands.address(weight.shifts),
        ends=routed.ends.data_ptr(),
        tier_count=len(weight.parts),
        experts=experts,
        expert_row_blocks=m // ROWS_PER_BLOCK,
        k=k,
        atoms=atom_count(k, weight.format),
        stages=config.stages,
        stage_row_blocks=config.stage_row_blocks,
        top_k=top_k,
        order=CtaOrder.of(config.tier_ctas[0], config.ctas),
        x=x.data_ptr(),
        tokens=routed.tokens.data_ptr(),
        weights=routed.weights.data_ptr(),
        places=routed.places.data_ptr(),
        y=out.data_ptr(),
        partials=0 if sums is None else sums.partials.data_ptr(),
        arrivals=0 if sums is None else sums.arrivals.data_ptr(),
    )
    row_block = cta = 0
    for number, part in enumerate(weight.parts):
        args.tiers[number] = _Tier(row_block, cta, part.split.group, config.windows[number])
        row_block += part.split.row_blocks
        cta += config.tier_ctas[number]
    args.tiers[len(weight.parts)] = _Tier(row_block, cta)
    macros = defines(weight.dtype, config.x_tiles, down=sums is not None)
    jit.kernel(SOURCE, "grouped_splitk", {**macros, **weight.format.macros}).launch(
        config.ctas, SPLITK_THREADS, args, shared_bytes=config.shared_bytes, pdl=pdl
    )
    return out


def defines(dtype: torch.dtype, x_tiles: int, *, down: bool) -> Macros:
    """Macros of one kernel variant."""
    few = {"TILES": x_tiles, "DOWN": int(down), "MAX_EXPERTS": MAX_EXPERTS, "WGMMA": 0}
    return operands.defines(dtype) | few


@compiled_ahead(SOURCE, seconds=4)
def _variants(needs: Needs) -> list[Macros]:
    """Of the models' tiles for any number of rows up to a chunk's."""
    return [
        {**defines(needs.dtype, x_tiles, down=adds), **stored.macros}
        for stored in needs.formats
        for x_tiles in _tiles(needs, stored)
        for adds in (False, True)
    ]


def _tiles(needs: Needs, stored: WeightFormat) -> list[int]:
    """Tiles of X that launches have."""
    if needs.every:
        return [tiles for tiles in SPLITK_X_TILES if 8 * tiles <= splitk_rows(stored.atom_bytes)]
    if (of := needs.routing) is None:
        return []
    chosen = partial(
        grouped_tiles, experts=of.experts, top_k=of.top_k, atom_bytes=stored.atom_bytes
    )
    return sorted({chosen(rows) for rows in range(1, EXPERT_CHUNK_ROWS + 1)}, reverse=True)
