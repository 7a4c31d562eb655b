"""From the options of `dakrun bench` to what was measured, whichever the kernel.

torch is imported when something is to be measured, not before.
"""

from collections.abc import Callable
from typing import Any

from dakrun.bench.attention_sweep import AttentionSweep, attention_sweep
from dakrun.bench.gemm_sweep import GemmSweep, gemm_sweep
from dakrun.bench.output import Record
from dakrun.hardware import HardwareProfile

AnySweep = GemmSweep | AttentionSweep


def asked_sweep(kernel: str, asked: dict[str, Any]) -> AnySweep:
    """The sweep of `kernel` that its options ask for; UsageError where one is malformed."""
    return gemm_sweep(**asked) if kernel == "gemm" else attention_sweep(**asked)


def check(sweep: AnySweep) -> None:
    """Raise UsageError where its kernel does not take the sweep, CannotRun without a GPU."""
    from dakrun.bench.tiers import check_gpu

    if isinstance(sweep, GemmSweep):
        from dakrun.bench.gemm import check_rows

        check_rows(sweep)
    check_gpu()


def measure(
    sweep: AnySweep, profile: HardwareProfile, *, command: str, note: Callable[[str], None]
) -> Record:
    """What measure_gemm() or measure_attention() finds."""
    if isinstance(sweep, GemmSweep):
        from dakrun.bench.gemm import measure_gemm

        return measure_gemm(sweep, profile, command=command, note=note)
    from dakrun.bench.attention import measure_attention

    return measure_attention(sweep, profile, command=command, note=note)
