"""From the options of `dakrun bench` to records: gemm.py and attention.py measure kernels.

model.py measures models. torch is imported when measuring starts.
"""

from collections.abc import Callable, Iterator
from typing import Any

from dakrun.hardware import HardwareProfile
from dakrun.lab.bench.attention_sweep import AttentionSweep, attention_sweep
from dakrun.lab.bench.gemm_sweep import GemmSweep, gemm_sweep
from dakrun.lab.bench.model_sweep import ModelSweep, model_sweep
from dakrun.lab.bench.output import Record

AnySweep = GemmSweep | AttentionSweep | ModelSweep

_SWEEPS: dict[str, Callable[..., AnySweep]] = {
    "gemm": gemm_sweep,
    "attention": attention_sweep,
    "model": model_sweep,
}


def parse_sweep(subject: str, options: dict[str, Any]) -> AnySweep:
    """The sweep of "gemm", "attention" or "model" that the command line's options describe.

    Raises UsageError if one is malformed.
    """
    return _SWEEPS[subject](**options)


def check_device(sweep: AnySweep) -> None:
    """Raise CannotRun if the sweep needs a GPU and there is none."""
    if isinstance(sweep, ModelSweep) and sweep.rival is None:
        return
    from dakrun.lab.bench.tiers import check_gpu

    check_gpu()


def measure(
    sweep: AnySweep, profile: HardwareProfile, *, command: str, progress: Callable[[str], None]
) -> Iterator[Record]:
    """A record of all rows so far: once for a kernel, after each point of a model."""
    if isinstance(sweep, ModelSweep):
        from dakrun.lab.bench.model import measure_model

        yield from measure_model(sweep, profile, command=command, progress=progress)
    elif isinstance(sweep, GemmSweep):
        from dakrun.lab.bench.gemm import measure_gemm

        yield measure_gemm(sweep, profile, command=command, progress=progress)
    else:
        from dakrun.lab.bench.attention import measure_attention

        yield measure_attention(sweep, profile, command=command, progress=progress)
