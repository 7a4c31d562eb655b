"""`dakrun profile`: measures this machine for the planner.

run.py goes from options to a saved profile. gpu.py measures a GPU with the sweeps of sweeps.py and
the costs of gemm_costs.py and attention_costs.py, which congestion.py fits; cpu.py and
cpu_costs.py measure a CPU.
table.py and plot.py show a profile; machine.py has checks of the hardware, which are imported from
there. Importing this imports no torch.
"""

from typing import TYPE_CHECKING

from dakrun.probe.congestion import (
    MIN_KEPT,
    PER_SM,
    Point,
    arithmetic_rates,
    choose_window,
    fixed_cost,
    grouped,
    op_costs,
    widened,
)
from dakrun.probe.measurement import (
    FULL,
    KIB,
    MIB,
    QUICK,
    Effort,
    Measurement,
    Ring,
    buffer_sizes,
    provenance,
    ring_for,
    spread,
    steadier,
)
from dakrun.probe.run import (
    Probe,
    describe_profile,
    device_name,
    duration,
    kept_or_measured,
    measure,
    measured_device,
    save,
    spread_warning,
    target,
)

if TYPE_CHECKING:
    from dakrun.probe.attention_costs import attention_sweep, sampling_sweep
    from dakrun.probe.chain import Launch, graph_seconds, launch_seconds
    from dakrun.probe.cpu import measure_cpu
    from dakrun.probe.cpu_costs import Sizes
    from dakrun.probe.gemm_costs import linear_sweep, many_rows_sweep, norm_sweep, staged_seconds
    from dakrun.probe.gpu import GpuProbe, measure_gpu, measured_variants
    from dakrun.probe.plot import best_by_doubling, chains, curves, draw
    from dakrun.probe.sweeps import Bench, Buffer, copy_seconds
    from dakrun.probe.table import Grid, facts, grid, grids, heat_map, render, short_bytes

__all__ = [
    "FULL", "KIB", "MIB", "MIN_KEPT", "PER_SM", "QUICK", "Bench", "Buffer", "Effort", "GpuProbe",
    "Grid", "Launch", "Measurement", "Point", "Probe", "Ring", "Sizes", "arithmetic_rates",
    "attention_sweep", "best_by_doubling", "buffer_sizes", "chains", "choose_window",
    "copy_seconds", "curves", "describe_profile", "device_name", "draw", "duration", "facts",
    "fixed_cost", "graph_seconds", "grid", "grids", "grouped", "heat_map", "kept_or_measured",
    "launch_seconds", "linear_sweep", "many_rows_sweep", "measure", "measure_cpu", "measure_gpu",
    "measured_device", "measured_variants", "norm_sweep", "op_costs", "provenance", "render",
    "ring_for", "sampling_sweep", "save", "short_bytes", "spread", "spread_warning",
    "staged_seconds", "steadier", "target", "widened",
]  # fmt: skip

_MODULES = {
    "attention_costs": ("attention_sweep", "sampling_sweep"),
    "chain": ("Launch", "graph_seconds", "launch_seconds"),
    "cpu": ("measure_cpu",),
    "cpu_costs": ("Sizes",),
    "gemm_costs": ("linear_sweep", "many_rows_sweep", "norm_sweep", "staged_seconds"),
    "gpu": ("GpuProbe", "measure_gpu", "measured_variants"),
    "plot": ("best_by_doubling", "chains", "curves", "draw"),
    "sweeps": ("Bench", "Buffer", "copy_seconds"),
    "table": ("Grid", "facts", "grid", "grids", "heat_map", "render", "short_bytes"),
}

if not TYPE_CHECKING:  # a type checker would accept any name of the package

    def __getattr__(name: str) -> object:
        for module, names in _MODULES.items():
            if name in names:
                from importlib import import_module

                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
