"""`dakrun bench`: kernels and models measured against this machine's memory bandwidth.

run.py goes from options to records. Cases to measure: gemm_sweep.py, attention_sweep.py,
model_sweep.py. Measuring: gemm.py, attention.py, model.py, with memory from tiers.py and ceilings
from ceilings.py. Rivals of whole models: rival.py, prefetch.py. Results: rows.py, model_rows.py,
output.py, model_plot.py. Importing this imports no torch.
"""

from typing import TYPE_CHECKING

from dakrun.bench.attention_sweep import (
    DEFAULT_SLOTS,
    AttentionCase,
    AttentionSweep,
    Slots,
    attention_sweep,
    parse_slots,
    slot_bytes,
)
from dakrun.bench.ceilings import FULL, MAX_LAUNCHES, MIB, Ceilings, Effort, link_ring
from dakrun.bench.gemm_sweep import (
    DEFAULT_SHAPES,
    GemmCase,
    GemmSweep,
    Shape,
    gemm_sweep,
    parse_shape,
)
from dakrun.bench.model_plot import draw, ideal_s, lines
from dakrun.bench.model_rows import (
    ModelRow,
    RivalRun,
    Run,
    failed_row,
    limit_s,
    measured_links,
    measured_row,
    model_columns,
)
from dakrun.bench.model_sweep import ModelSweep, Point, model_sweep
from dakrun.bench.output import Record, as_text, check_output, commit, render, write
from dakrun.bench.rows import AttentionRow, GemmRow, columns
from dakrun.bench.run import check_device, measure, parse_sweep
from dakrun.bench.sweep import (
    TURNING_POINT,
    Forecast,
    buffer_bytes,
    forecast,
    parse_ratio,
    remote_units,
)

if TYPE_CHECKING:
    from dakrun.bench.attention import ATTENTION_EFFORT, AttentionChains, measure_attention
    from dakrun.bench.gemm import GemmChains, measure_gemm
    from dakrun.bench.model import ROUNDS, ModelBench, measure_model, requests
    from dakrun.bench.prefetch import (
        Prefetch,
        built,
        decoder_layers,
        offloaded,
        spread,
        tier_bytes,
    )
    from dakrun.bench.rival import RivalStep, Step, meta_model, rival_step, transformers_config
    from dakrun.bench.tiers import allocate, whole

__all__ = [
    "ATTENTION_EFFORT", "DEFAULT_SHAPES", "DEFAULT_SLOTS", "FULL", "MAX_LAUNCHES", "MIB", "ROUNDS",
    "TURNING_POINT", "AttentionCase", "AttentionChains", "AttentionRow", "AttentionSweep",
    "Ceilings", "Effort", "Forecast", "GemmCase", "GemmChains", "GemmRow", "GemmSweep",
    "ModelBench", "ModelRow", "ModelSweep", "Point", "Prefetch", "Record", "RivalRun", "RivalStep",
    "Run", "Shape", "Slots", "Step", "allocate", "as_text", "attention_sweep", "buffer_bytes",
    "built", "check_device", "check_output", "columns", "commit", "decoder_layers", "draw",
    "failed_row", "forecast", "gemm_sweep", "ideal_s", "limit_s", "lines", "link_ring", "measure",
    "measure_attention", "measure_gemm", "measure_model", "measured_links", "measured_row",
    "meta_model", "model_columns", "model_sweep", "offloaded", "parse_ratio", "parse_shape",
    "parse_slots", "parse_sweep", "remote_units", "render", "requests", "rival_step", "slot_bytes",
    "spread", "tier_bytes", "transformers_config", "whole", "write",
]  # fmt: skip

_MODULES = {
    "ATTENTION_EFFORT": "attention", "AttentionChains": "attention",
    "measure_attention": "attention", "GemmChains": "gemm", "measure_gemm": "gemm",
    "ROUNDS": "model", "ModelBench": "model", "measure_model": "model", "requests": "model",
    "Prefetch": "prefetch",
    "built": "prefetch", "decoder_layers": "prefetch", "offloaded": "prefetch",
    "spread": "prefetch", "tier_bytes": "prefetch", "RivalStep": "rival", "Step": "rival",
    "meta_model": "rival", "rival_step": "rival", "transformers_config": "rival",
    "allocate": "tiers", "whole": "tiers",
}  # fmt: skip

if not TYPE_CHECKING:  # a type checker would accept any name of the package

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
