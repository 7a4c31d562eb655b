"""Points of single ops as cases of `dakrun bench`, their forecasts, and their bytes over the link.

Needs no GPU. Torch is imported where an access is asked for.
"""

from collections.abc import Sequence
from dataclasses import replace

from dakrun.errors import UsageError
from dakrun.formats import PACKED16, WeightFormat
from dakrun.formats.device_layout import Quantised
from dakrun.geometry import SPLITK_MAX_ROWS, TILED_MAX_ROWS
from dakrun.hardware import Card
from dakrun.lab.bench.kernel_sweep import parse_shape
from dakrun.lab.cases import Case, Forecast, Operand, Slots, Weight, forecast
from dakrun.lab.ceilings import FULL, Effort
from dakrun.lab.evaluate.points import AttentionPoint, OpPoint, ProductPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.launches import TierAccess, kernel_for, tiled_config
from dakrun.plan import Policy
from dakrun.units import ceil_div

# Matrices of batched products, by bits. 4 bits have a scale for each row's 128 columns.
STORED: dict[int, WeightFormat] = {16: PACKED16, 4: Quantised("int4", 128)}


def remote_names(scope: Scope, remote: str) -> tuple[str, ...]:
    """The remote tiers that `remote` names in the profile; UsageError if it has none."""
    return Policy(remote=(remote,)).remote_tiers(scope.profile)


def case_of(scope: Scope, point: OpPoint, effort: Effort = FULL) -> Case:
    """The case of a point: row blocks or slots in HBM and in the remote tier.

    Raises UsageError if the model has no such op.
    """
    model = scope.models[point.model]
    operand: Operand
    if isinstance(point, AttentionPoint):
        heads = model.num_heads, model.num_kv_heads
        operand = Slots(point.batch_size, *heads, point.length, head_dim=model.head_dim)
    elif isinstance(point, ProductPoint) and point.op[0].isdigit():
        operand = replace(parse_shape(point.op), n=point.n)
    else:
        assert isinstance(point, ProductPoint)
        ops = {op.name: op for op in scope.ops(point.model, batch_size=point.n, prompt_len=1)}
        if point.op not in ops:
            hint = f"it has: {', '.join(ops)}"
            raise UsageError(f"{point.model} has no op {point.op!r}", hint=hint)
        operand = Weight(*ops[point.op].shape, (point.op,), point.n)
    return Case.of(operand, model.dtype, point.ratio, 0.0, 2, effort)


def foreseen(scope: Scope, point: OpPoint, case: Case) -> Forecast:
    """The planner's prediction for a case of one op."""
    return forecast(case, scope.profile, remote_names(scope, point.remote))


def ablated(card: Card, without: Sequence[str]) -> Card:
    """The card whose launches do without the techniques in `without`."""
    return replace(
        card,
        windows="window" not in without,
        even_waves="alignment" not in without,
        multicast="multicast" not in without,
    )


def link_reads(scope: Scope, point: OpPoint, case: Case) -> int:
    """How often the launches of a point read a remote unit, by their configurations.

    The tiled GEMM reads remote row blocks once for every tile of X; multicast makes these tiles
    taller. Torch multiplies pieces of W that are unpacked once.
    """
    weight = case.operand
    if not isinstance(weight, Weight):
        return 1
    card, remote = ablated(scope.profile.card, point.without), case.units[1] > 0
    by = kernel_for(weight.n, weight.units, weight.cols, remote=remote, card=card)
    if by == "splitk":
        return ceil_div(weight.n, SPLITK_MAX_ROWS)
    if by == "torch" or not remote:
        return 1
    from dakrun.engine import direct_accesses

    names = remote_names(scope, point.remote)
    sms = foreseen(scope, point, case).sms[1:]
    access = TierAccess(), *direct_accesses(scope.profile, names, sms, card)
    times = 0
    for first in range(0, weight.n, TILED_MAX_ROWS):
        n = min(TILED_MAX_ROWS, weight.n - first)
        config = tiled_config(n, case.units, access, cols=weight.cols, card=card)
        times += ceil_div(n, config.launches[0].shape.rows)
    return times
