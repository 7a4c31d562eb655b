"""Planning: the ratio of each operand's bytes in each tier, and the predicted speed.

planner.py makes plans in three stages: op_costs.py (time of an op), placement.py (best ratios,
rounded), assemble.py (the Plan). README.md has the formulas. Needs no torch, GPU or weights.
"""

from dakrun.plan.batch_size import choose_batch_size
from dakrun.plan.cta_model import launch_times, sms_by_tier
from dakrun.plan.expected_run import ExpectedRun
from dakrun.plan.footprint import (
    DRAFTING_ROWS,
    PREFILL_CHUNK_TOKENS,
    PROMPT_ENDS,
    RESERVE_BYTES,
    VERIFIED_TOKENS,
    kv_staging_bytes,
    pass_tokens,
)
from dakrun.plan.keywords import Keywords, RunKeywords, run_options
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.ops import (
    Op,
    attention_op,
    cost_kinds,
    decode_ops,
    kv_positions,
    linear_op,
    read_positions,
    weight_bytes,
)
from dakrun.plan.options import RunOptions
from dakrun.plan.peak_blocks import blocks_suffice
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.planner import make_plan
from dakrun.plan.policy import Policy, Strategy, Transport, parse_remote
from dakrun.plan.prefill import pass_seconds, predict_prefill
from dakrun.plan.prompt_groups import PromptGroups
from dakrun.plan.roofline import (
    STAGED_TOGETHER,
    Links,
    bound_time,
    bound_times,
    compute_time,
    is_windowed,
    predicted_time,
)
from dakrun.plan.run_bound import run_bound
from dakrun.plan.run_time import RunForecast
from dakrun.plan.running_requests import first_that_fits
from dakrun.plan.staging import RING_GROUPS, bytes_ahead, ring_bytes, spare_experts
from dakrun.plan.step_time import (
    ACCEPTANCES,
    DraftForecast,
    draft_forecasts,
    drafts_of,
    tokens_kept,
)

__all__ = [
    "ACCEPTANCES",
    "DRAFTING_ROWS",
    "PREFILL_CHUNK_TOKENS",
    "PROMPT_ENDS",
    "RESERVE_BYTES",
    "RING_GROUPS",
    "STAGED_TOGETHER",
    "VERIFIED_TOKENS",
    "DraftForecast",
    "ExpectedRun",
    "Keywords",
    "Links",
    "Op",
    "OpPlan",
    "Plan",
    "Policy",
    "PromptGroups",
    "RunForecast",
    "RunKeywords",
    "RunOptions",
    "StepCosts",
    "Strategy",
    "Transport",
    "attention_op",
    "blocks_suffice",
    "bound_time",
    "bound_times",
    "bytes_ahead",
    "choose_batch_size",
    "compute_time",
    "cost_kinds",
    "decode_ops",
    "draft_forecasts",
    "drafts_of",
    "first_that_fits",
    "is_windowed",
    "kv_positions",
    "kv_staging_bytes",
    "launch_times",
    "linear_op",
    "make_plan",
    "parse_remote",
    "pass_seconds",
    "pass_tokens",
    "predict_prefill",
    "predicted_time",
    "read_positions",
    "ring_bytes",
    "run_bound",
    "run_options",
    "sms_by_tier",
    "spare_experts",
    "tokens_kept",
    "weight_bytes",
]
