"""From CUDA sources to launches.

nvrtc compiles, jit caches, loads and launches, card says what launches may take of a GPU, held
keeps them to another card's limits, graph captures, copy_engine copies between tiers, tensor_map
describes matrices to TMA, operands has what wrappers share, needs where they register variants.
"""

from dakrun.kernels.runtime.card import card_of, described_card, gpu_id, gpu_name, has_kernels
from dakrun.kernels.runtime.copy_engine import CopyStream, copy
from dakrun.kernels.runtime.graph import (
    capture,
    edge_kinds,
    graph_edges,
    programmatic_lead,
    replay_seconds,
)
from dakrun.kernels.runtime.held import held_card, held_to
from dakrun.kernels.runtime.jit import (
    Kernel,
    architecture,
    cached_cubin,
    compile_ahead,
    compiling,
    kernel,
)
from dakrun.kernels.runtime.nvrtc import ARCHITECTURES, Compiled, CompileError, compile_cubin
from dakrun.kernels.runtime.operands import DTYPES, CtaOrder

__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "CompileError",
    "Compiled",
    "CopyStream",
    "CtaOrder",
    "Kernel",
    "architecture",
    "cached_cubin",
    "capture",
    "card_of",
    "compile_ahead",
    "compile_cubin",
    "compiling",
    "copy",
    "described_card",
    "edge_kinds",
    "gpu_id",
    "gpu_name",
    "graph_edges",
    "has_kernels",
    "held_card",
    "held_to",
    "kernel",
    "programmatic_lead",
    "replay_seconds",
]
