"""Points of single ops as cases of `dakrun bench`, their forecasts, and their bytes over the link.

Needs no GPU. Torch is imported where an access is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from dakrun.config import Workload
from dakrun.errors import UsageError
from dakrun.geometry import (
    ATOM_COLS,
    ROWS_PER_BLOCK,
    SPLITK_MAX_ROWS,
    TILED_MAX_ROWS,
    row_block_count,
)
from dakrun.hardware import Card
from dakrun.lab.bench.attention_sweep import AttentionCase, Slots, slot_bytes
from dakrun.lab.bench.ceilings import FULL, Effort
from dakrun.lab.bench.gemm_sweep import GemmCase, Shape
from dakrun.lab.bench.sweep import BenchDtype, Case, Forecast, forecast, units_by_tier
from dakrun.lab.evaluate.points import AttentionPoint, ProductPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.launches import By, TierAccess, kernel_for, tiled_config
from dakrun.plan import Op, Policy, decode_ops
from dakrun.units import ceil_div

SIXTEEN_BITS = 2  # bytes of an element in packed weights


def remote_names(scope: Scope, remote: str) -> tuple[str, ...]:
    """The remote tiers that `remote` names in the profile; UsageError if it has none."""
    return Policy(remote=(remote,)).remote_tiers(scope.profile)


def linear_op(scope: Scope, point: ProductPoint) -> Op:
    """The op of the point, for its rows of X; UsageError if the model has no such op."""
    workload = Workload(batch_size=point.n, prompt_len=1, new_tokens=1, max_model_len=2)
    ops = {op.name: op for op in decode_ops(scope.models[point.model], workload)}
    if point.op not in ops:
        raise UsageError(f"{point.model} has no op {point.op!r}", hint=f"it has: {', '.join(ops)}")
    return ops[point.op]


def product_case(scope: Scope, point: ProductPoint, effort: Effort = FULL) -> GemmCase:
    """The case of a product: row blocks in HBM and in the remote tier."""
    shape = Shape(*linear_op(scope, point).shape, (point.op,))
    blocks = row_block_count(shape.rows)
    size = ROWS_PER_BLOCK * ceil_div(shape.cols, ATOM_COLS) * ATOM_COLS * SIXTEEN_BITS
    return GemmCase(
        shape=shape,
        n=point.n,
        requested=point.ratio,
        units=units_by_tier(blocks, point.ratio, 0.0, tiers=2),
        unit_bytes=size,
        launches=effort.launches(blocks * size),
    )


def attention_case(scope: Scope, point: AttentionPoint, effort: Effort = FULL) -> AttentionCase:
    """The case of decode attention: slots in HBM and in the remote tier."""
    model = scope.models[point.model]
    slots = Slots(point.batch_size, model.num_heads, model.num_kv_heads, point.length)
    unit_bytes = slot_bytes(slots, model.head_dim, dtype_of(scope, point.model))
    return AttentionCase(
        slots=slots,
        head_dim=model.head_dim,
        requested=point.ratio,
        units=units_by_tier(slots.batch, point.ratio, 0.0, tiers=2),
        unit_bytes=unit_bytes,
        launches=effort.launches(slots.batch * unit_bytes),
    )


def dtype_of(scope: Scope, model: str) -> BenchDtype:
    """The type of the model's weights."""
    return cast(BenchDtype, scope.models[model].dtype)


def foreseen(scope: Scope, point: ProductPoint | AttentionPoint, case: Case) -> Forecast:
    """The planner's prediction for a case of one op."""
    names = remote_names(scope, point.remote)
    return forecast(case, dtype_of(scope, point.model), scope.profile, names)


def ablated(card: Card, without: Sequence[str]) -> Card:
    """The card whose launches do without the techniques in `without`."""
    return replace(
        card,
        windows="window" not in without,
        even_waves="alignment" not in without,
        multicast="multicast" not in without,
    )


@dataclass(frozen=True)
class LinkReads:
    """The kernel of a product, and how often it reads a remote row block."""

    by: By
    times: int


def link_reads(scope: Scope, point: ProductPoint, case: GemmCase) -> LinkReads:
    """How often remote row blocks of a product cross the link, from the kernel's configuration.

    The tiled GEMM reads them once for every tile of X; multicast makes these tiles taller. Torch
    multiplies pieces of W that are unpacked once.
    """
    card, remote = ablated(scope.profile.card, point.without), case.units[1] > 0
    by = kernel_for(point.n, sum(case.units), case.shape.cols, remote=remote, card=card)
    if by == "splitk":
        return LinkReads(by, ceil_div(point.n, SPLITK_MAX_ROWS))
    if by == "torch" or not remote:
        return LinkReads(by, 1)
    from dakrun.engine import direct_accesses

    names = remote_names(scope, point.remote)
    sms = foreseen(scope, point, case).sms[1:]
    access = TierAccess(), *direct_accesses(scope.profile, names, sms, card)
    times = 0
    for first in range(0, point.n, TILED_MAX_ROWS):
        n = min(TILED_MAX_ROWS, point.n - first)
        config = tiled_config(n, case.units, access, cols=case.shape.cols, card=card)
        times += ceil_div(n, config.launches[0].shape.rows)
    return LinkReads(by, times)
