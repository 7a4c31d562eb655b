"""The engine: requests in, completions out, over a model whose operands lie in several tiers.

engine.py has the loop of steps: waiting.py lets requests begin, admission.py gives them slots and
the KV blocks of their prompts, preemption.py gives KV blocks to the next rows and queues preempted
requests, prompt_queue.py cuts prompts into parts, draft_choice.py says which steps carry drafts.
answers.py begins and ends requests; ended.py queues ended requests until results.py makes their
results. unfinished.py collects the choices of a row, and has the requests to begin again after an
error. offline.py has the calls of the Python API that complete prompts, rows_bar.py their
progress bar in the terminal.

progress.py has the state of a request, kv_cache.py the KV blocks of all slots and tiers,
kv_layout.py what lies in a block, prefix_cache.py the blocks that prompts share, and swap.py copies
blocks to host memory and back.

step.py has the tokens of a step; acceptance.py says which of its drafts count. A runner (runner.py)
computes a step: graph_runner.py on the GPU's kernels (replays.py counts the graphs' replays),
reference_runner.py in plain torch (reference_backend.py). On the GPU row_map.py has the rows of the
batch, of a size in buckets.py, slot_sampling.py how their tokens are chosen, step_graphs.py the
CUDA graphs of decode_step.py and of verify_step.py (with slot_progress.py); prefill.py computes
prompts with prompt_attention.py and kv_writer.py, few of them in CUDA graphs (pass_graphs.py),
kernel_backend.py launches ops, and staging.py copies remote matrices ahead.

expert_use.py counts the experts that tokens choose. By these counts expert_moves.py exchanges
experts; on the GPU's kernels expert_copies.py copies them.

sampler.py chooses tokens in torch, from logits that adjustments.py changes as a request asks;
logprobs.py has their log-probabilities. mask_writer.py writes which tokens the form of an answer
allows for the GPU's steps. machine_planner.py plans for this machine's free memory, build.py makes
the runner that a plan asks for.
"""

from dakrun.engine.admission import Admission
from dakrun.engine.buckets import buckets, fill_order, fitting
from dakrun.engine.build import (
    SPLITK_ROWS,
    direct_accesses,
    tier_accesses,
)
from dakrun.engine.decode_step import LOG_STEPS, DecodeStep
from dakrun.engine.draft_choice import DraftChoice
from dakrun.engine.engine import Engine
from dakrun.engine.expert_copies import ExpertCopies
from dakrun.engine.graph_runner import GraphRunner
from dakrun.engine.kernel_backend import KernelBackend
from dakrun.engine.kv_writer import KVWriter
from dakrun.engine.mask_writer import MaskWriter
from dakrun.engine.prefill import Prefill
from dakrun.engine.progress import EngineStats
from dakrun.engine.reference_runner import ReferenceRunner
from dakrun.engine.runner import gpu_errors
from dakrun.engine.sampler import noise, request_seed, sample
from dakrun.engine.staging import (
    PassStaging,
    RingSpan,
    Staging,
    StagingRing,
    grouped,
    ring_spans,
    staged_bytes,
)
from dakrun.engine.step import Accepted, Row, Step
from dakrun.engine.swap import SwapSpace, swap_beats_recompute

__all__ = [
    "LOG_STEPS",
    "SPLITK_ROWS",
    "Accepted",
    "Admission",
    "DecodeStep",
    "DraftChoice",
    "Engine",
    "EngineStats",
    "ExpertCopies",
    "GraphRunner",
    "KVWriter",
    "KernelBackend",
    "MaskWriter",
    "PassStaging",
    "Prefill",
    "ReferenceRunner",
    "RingSpan",
    "Row",
    "Staging",
    "StagingRing",
    "Step",
    "SwapSpace",
    "buckets",
    "direct_accesses",
    "fill_order",
    "fitting",
    "gpu_errors",
    "grouped",
    "noise",
    "request_seed",
    "ring_spans",
    "sample",
    "staged_bytes",
    "swap_beats_recompute",
    "tier_accesses",
]
