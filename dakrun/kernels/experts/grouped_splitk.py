"""Products of few rows with their experts, or in a batch (native/grouped_splitk.cu).

Knows operands and a launch configuration, no models and no plans. reference.py has the same in
plain torch.
"""

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from dakrun.formats import WeightFormat
from dakrun.geometry import MAX_TIERS, ROWS_PER_BLOCK, SPLITK_THREADS, SPLITK_X_TILES
from dakrun.kernels.experts.route import Routed
from dakrun.kernels.gemm.packed_matrix import addresses, atom_count, check_stacked
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import CtaOrder, ints, pointers
from dakrun.launches import (
    MAX_EXPERTS,
    GroupedConfig,
    few_expert_rows,
    grouped_tiles,
    splitk_rows,
)
from dakrun.memory.matrix import TieredMatrix

SOURCE = "grouped_splitk.cu"
Outputs = Literal["gated", "added", "stored"]
OUTPUTS: tuple[Outputs, ...] = ("gated", "added", "stored")


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
        *pointers("x", "tokens", "weights", "pairs", "y", "partials", "arrivals"),
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
    _check_room(n, routed, len(out))
    return _launch(
        x, n, routed.ends, weight, config, out, m // 2, "gated", pdl=pdl,
        top_k=routed.pairs.shape[1], tokens=routed.tokens.data_ptr(),
    )  # fmt: skip


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
    m, top_k = weight.shape[0] // len(routed.ends), routed.pairs.shape[1]
    wanted: dict[str, operands.Wanted] = {
        "partials": (sums.partials, (len(sums.partials), m), torch.float32),
        "arrivals": (sums.arrivals, (len(sums.arrivals), m // ROWS_PER_BLOCK), torch.int32),
    }
    operands.check_operands(x.device, wanted)
    _check_room(len(out), routed, len(x), len(sums.partials), top_k * len(sums.arrivals))
    return _launch(
        x, len(x), routed.ends, weight, config, out, m, "added", pdl=pdl, top_k=top_k,
        tokens=routed.tokens.data_ptr(), weights=routed.weights.data_ptr(),
        pairs=routed.pairs.data_ptr(), partials=sums.partials.data_ptr(),
        arrivals=sums.arrivals.data_ptr(),
    )  # fmt: skip


def multiply(
    x: torch.Tensor,
    ends: torch.Tensor,
    weight: TieredMatrix,
    config: GroupedConfig,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """out[i] = x[i] of [N, K] times the matrix of its expert, [N, M], for few rows of each expert.

    Rows up to `ends`[e], int32 [E], are those of the experts up to e: with as many of each it is a
    batched product. `weight` [E M, K] is stored as in gate_up(). With `pdl` the launch may start
    before its predecessor ends, which must not write `ends`: they are read meanwhile.
    Raises ValueError if an operand does not fit the others.
    """
    m = weight.shape[0] // len(ends)
    operands.check_operands(x.device, {"out": (out, (len(x), m), weight.dtype)})
    return _launch(x, len(x), ends, weight, config, out, m, "stored", pdl=pdl)


def _check_room(n: int, routed: Routed, *pairs: int) -> None:
    """Raise ValueError unless there is room for the pairs of `n` rows, `pairs` among others."""
    top_k = routed.pairs.shape[1]
    rooms = [top_k * len(routed.pairs), len(routed.tokens), *pairs]
    if min(rooms) < n * top_k:
        raise ValueError(
            f"expected room for the {n * top_k} pairs of {n} rows, got it for {min(rooms)}"
        )


def _launch(
    x: torch.Tensor,
    x_rows: int,
    ends: torch.Tensor,
    weight: TieredMatrix,
    config: GroupedConfig,
    out: torch.Tensor,
    width: int,
    outputs: Outputs,
    *,
    pdl: bool,
    **of_pairs: int,
) -> torch.Tensor:
    """Launch the variant for `outputs`, whose arguments `of_pairs` are."""
    (all_rows, k), experts = weight.shape, len(ends)
    if all_rows % (experts * ROWS_PER_BLOCK) or experts > MAX_EXPERTS:
        raise ValueError(
            f"expected up to {MAX_EXPERTS} experts of whole row blocks, got {all_rows} rows of "
            f"{experts} experts"
        )
    wanted: dict[str, operands.Wanted] = {
        "x": (x, (x_rows, k), weight.dtype),
        "out": (out, (len(out), width), weight.dtype),
        "ends": (ends, (experts,), torch.int32),
    }
    operands.check_operands(x.device, wanted)
    check_stacked(weight, experts)
    operands.check_gpu(x.device)
    args = _Args(
        addresses=addresses(weight, x.device),
        shifts=operands.address(weight.shifts),
        ends=ends.data_ptr(),
        tier_count=len(weight.parts),
        experts=experts,
        expert_row_blocks=all_rows // experts // ROWS_PER_BLOCK,
        k=k,
        atoms=atom_count(k, weight.format),
        stages=config.stages,
        stage_row_blocks=config.stage_row_blocks,
        order=CtaOrder.of(config.tier_ctas[0], config.ctas),
        x=x.data_ptr(),
        y=out.data_ptr(),
        **of_pairs,
    )
    row_block = cta = 0
    for number, part in enumerate(weight.parts):
        args.tiers[number] = _Tier(row_block, cta, part.split.group, config.windows[number])
        row_block += part.split.row_blocks
        cta += config.tier_ctas[number]
    args.tiers[len(weight.parts)] = _Tier(row_block, cta)
    macros = defines(weight.dtype, config.x_tiles, outputs)
    jit.kernel(SOURCE, "grouped_splitk", {**macros, **weight.format.macros}).launch(
        config.ctas, SPLITK_THREADS, args, shared_bytes=config.shared_bytes, pdl=pdl
    )
    return out


def defines(dtype: torch.dtype, x_tiles: int, outputs: Outputs) -> Macros:
    """Macros of one kernel variant."""
    few = {"TILES": x_tiles, "OUTPUTS": OUTPUTS.index(outputs)}
    return operands.defines(dtype) | few | {"MAX_EXPERTS": MAX_EXPERTS, "WGMMA": 0}


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    """Of the models' tiles for any number of rows up to a chunk's; models store no products."""
    return [
        {**defines(needs.dtype, x_tiles, outputs), **stored.macros}
        for stored in needs.formats
        for x_tiles in _tiles(needs, stored)
        for outputs in OUTPUTS[: 3 if needs.every else 2]
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
    few = few_expert_rows(
        experts=of.experts, top_k=of.top_k, card=needs.card, atom_bytes=stored.atom_bytes
    )
    return sorted({chosen(rows) for rows in range(1, few + 1)}, reverse=True)
