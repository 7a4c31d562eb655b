"""Planning: the ratio of each operand's bytes in each tier, and the predicted speed.

planner.py makes plans in three stages: op_costs.py (time of an op), placement.py (best ratios,
rounded), assemble.py (the Plan). README.md has the formulas. Needs no torch, GPU or weights.
"""

from dakrun.plan.advice import (
    MIN_GAIN,
    ORIGINS,
    Advice,
    Alternative,
    advise,
    busy_shares,
    limits,
    resource_text,
)
from dakrun.plan.assemble import Candidate, cost_placement
from dakrun.plan.batch_size import MAX_BATCH_SIZE, batch_candidates, choose_batch_size
from dakrun.plan.cta_model import launch_times, read_times, sms_by_tier
from dakrun.plan.expected_run import ExpectedRun, RowTokens
from dakrun.plan.greedy import (
    Curve,
    best_total,
    best_uniform_total,
    greedy_ratios,
    uniform_ratios,
)
from dakrun.plan.many_rows import many_rows_sms, many_rows_times
from dakrun.plan.op_costs import StepCosts, waits_s
from dakrun.plan.ops import (
    PREFILL_CHUNK_TOKENS,
    RESERVE_BYTES,
    Op,
    activation_bytes,
    attention_op,
    decode_ops,
    kept_positions,
    kv_positions,
    kv_staging_bytes,
    linear_op,
    pass_tokens,
    vector_bytes,
    weight_bytes,
)
from dakrun.plan.options import RunOptions
from dakrun.plan.peak_blocks import blocks_suffice, peak_blocks
from dakrun.plan.placement import ideal_ratios, place, slot_candidates
from dakrun.plan.plan import (
    RING_GROUPS,
    OpPlan,
    PlacedOp,
    Plan,
    PrefillPlan,
    ring_bytes,
    staging_bytes,
)
from dakrun.plan.planner import MIN_OFFLOAD_GAIN, climb, make_plan
from dakrun.plan.policy import Policy, Strategy, Transport, parse_remote
from dakrun.plan.prefill import (
    PREFILL_LAUNCH_ROWS,
    Prefill,
    pass_seconds,
    passes,
    predict_prefill,
    requests_per_admission,
    with_prefill,
)
from dakrun.plan.problem import Problem
from dakrun.plan.roofline import (
    STAGED_TOGETHER,
    Links,
    bound_time,
    bound_times,
    compute_time,
    is_windowed,
    kernel_compute_time,
    predicted_time,
    sampling_time,
)
from dakrun.plan.rounding import RemoteGoal, remote_bytes, round_ratios
from dakrun.plan.run_bound import run_bound
from dakrun.plan.run_time import RunForecast, foretell
from dakrun.plan.running_requests import RequestLengths

__all__ = [
    "MAX_BATCH_SIZE",
    "MIN_GAIN",
    "MIN_OFFLOAD_GAIN",
    "ORIGINS",
    "PREFILL_CHUNK_TOKENS",
    "PREFILL_LAUNCH_ROWS",
    "RESERVE_BYTES",
    "RING_GROUPS",
    "STAGED_TOGETHER",
    "Advice",
    "Alternative",
    "Candidate",
    "Curve",
    "ExpectedRun",
    "Links",
    "Op",
    "OpPlan",
    "PlacedOp",
    "Plan",
    "Policy",
    "Prefill",
    "PrefillPlan",
    "Problem",
    "RemoteGoal",
    "RequestLengths",
    "RowTokens",
    "RunForecast",
    "RunOptions",
    "StepCosts",
    "Strategy",
    "Transport",
    "activation_bytes",
    "advise",
    "attention_op",
    "batch_candidates",
    "best_total",
    "best_uniform_total",
    "blocks_suffice",
    "bound_time",
    "bound_times",
    "busy_shares",
    "choose_batch_size",
    "climb",
    "compute_time",
    "cost_placement",
    "decode_ops",
    "foretell",
    "greedy_ratios",
    "ideal_ratios",
    "is_windowed",
    "kept_positions",
    "kernel_compute_time",
    "kv_positions",
    "kv_staging_bytes",
    "launch_times",
    "limits",
    "linear_op",
    "make_plan",
    "many_rows_sms",
    "many_rows_times",
    "parse_remote",
    "pass_seconds",
    "pass_tokens",
    "passes",
    "peak_blocks",
    "place",
    "predict_prefill",
    "predicted_time",
    "read_times",
    "remote_bytes",
    "requests_per_admission",
    "resource_text",
    "ring_bytes",
    "round_ratios",
    "run_bound",
    "sampling_time",
    "slot_candidates",
    "sms_by_tier",
    "staging_bytes",
    "uniform_ratios",
    "vector_bytes",
    "waits_s",
    "weight_bytes",
    "with_prefill",
]
