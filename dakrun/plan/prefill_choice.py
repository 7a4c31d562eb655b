"""How prompts are prefilled: how many tokens a pass has, and how it reads remote matrices.

Takes the placement as given, and the HBM that it leaves.
"""

from collections.abc import Iterator
from dataclasses import replace

from dakrun.plan.ops import activation_bytes
from dakrun.plan.plan import Plan, PrefillPlan
from dakrun.plan.policy import Transport
from dakrun.plan.prefill import PREFILL_LAUNCH_ROWS, predict_prefill

STAGING_BUFFERS = 2  # for the largest remote part of a matrix
NEAR = 0.02  # of the least time: what predictions are off by


def with_prefill(plan: Plan) -> Plan:
    """`plan` with the prefill of the least predicted TTFT that HBM has room for.

    Of those that are NEAR it the one that needs the least memory. With the GPU's kernels a pass has
    PREFILL_LAUNCH_ROWS tokens or, for remote matrices, which cross the link once for each, more.
    These are staged, if there is room: direct reads hold SMs up for longer than their bytes take,
    on an H200 by a factor of two where 30% of OPT-6.7B are in host memory. Where there is room for
    no such pass, it is as in plain torch.
    """
    if plan.profile.device != "cuda" or plan.model.dtype == "float32":
        return plan
    fitting = [option for option in _options(plan) if _room(option) >= 0] or [plan]
    options = [option for option in fitting if option.prefill.transport == "staged"] or fitting
    times = [predict_prefill(option).predicted_s for option in options]
    near = [
        option
        for option, time in zip(options, times, strict=True)
        if time <= (1 + NEAR) * min(times)
    ]
    return max(near, key=_room)


def staging_bytes(plan: Plan) -> int:
    """Buffers in the local tier through which staged bytes pass: the largest op's, twice.

    Decode steps and prefill use the same ones in turns.
    """
    sizes = [
        op.op.unit_bytes(counts[0], op.op.units)
        for op in plan.ops
        if op.transport == "staged"
        or (plan.prefill.transport == "staged" and op.op.category == "linear")
        for counts in set(op.placement)
    ]
    return STAGING_BUFFERS * max(sizes, default=0)


def _options(plan: Plan) -> Iterator[Plan]:
    work = plan.workload
    transports: list[Transport] = [plan.policy.transport or "direct"]
    tokens = most = PREFILL_LAUNCH_ROWS
    if any(op.op.category == "linear" and op.ratio > 0 for op in plan.ops):
        most = max(most, work.batch_size * work.prompt_len)
        if plan.policy.transport is None:
            transports.append("staged")
    while tokens < 2 * most:
        for transport in transports:
            yield _with(plan, PrefillPlan(chunk_tokens=tokens, transport=transport))
        tokens *= 2


def _with(plan: Plan, prefill: PrefillPlan) -> Plan:
    option = replace(plan, prefill=prefill)
    held = activation_bytes(plan.model, plan.workload, prefill.chunk_tokens)
    fixed = plan.fixed_bytes | {"activations": held}
    if staging := max(plan.fixed_bytes.get("staging", 0), staging_bytes(option)):
        fixed["staging"] = staging
    return replace(option, fixed_bytes=fixed)


def _room(plan: Plan) -> int:
    """Bytes that are left of the local tier."""
    return plan.budgets[0] - sum(plan.memory(0).values())
