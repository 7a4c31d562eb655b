"""From the options of `dakrun bench` to what was measured, whichever the kernel, or of a model.

torch is imported when something is to be measured, not before.
"""

from collections.abc import Callable, Iterator
from typing import Any

from dakrun.bench.attention_sweep import AttentionSweep, attention_sweep
from dakrun.bench.gemm_sweep import GemmSweep, gemm_sweep
from dakrun.bench.model_sweep import ModelSweep, model_sweep
from dakrun.bench.output import Record
from dakrun.hardware.profile import HardwareProfile

AnySweep = GemmSweep | AttentionSweep | ModelSweep

_SWEEPS: dict[str, Callable[..., AnySweep]] = {
    "gemm": gemm_sweep,
    "attention": attention_sweep,
    "model": model_sweep,
}


def asked_sweep(subject: str, asked: dict[str, Any]) -> AnySweep:
    """The sweep of a kernel, or of a "model", that its options ask for.

    Raises UsageError where one is malformed.
    """
    return _SWEEPS[subject](**asked)


def check(sweep: AnySweep) -> None:
    """Raise CannotRun where the sweep needs a GPU and there is none."""
    if isinstance(sweep, ModelSweep) and sweep.rival is None:
        return
    from dakrun.bench.tiers import check_gpu

    check_gpu()


def measure(
    sweep: AnySweep, profile: HardwareProfile, *, command: str, note: Callable[[str], None]
) -> Iterator[Record]:
    """What was found so far, again and again, and in the end all of it."""
    if isinstance(sweep, ModelSweep):
        from dakrun.bench.model import measure_model

        yield from measure_model(sweep, profile, command=command, note=note)
    elif isinstance(sweep, GemmSweep):
        from dakrun.bench.gemm import measure_gemm

        yield measure_gemm(sweep, profile, command=command, note=note)
    else:
        from dakrun.bench.attention import measure_attention

        yield measure_attention(sweep, profile, command=command, note=note)
