"""From the options of `dakrun bench` to records: kernel.py measures kernels, model.py models.

torch is imported when measuring starts.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile
from dakrun.lab.bench.kernel_sweep import (
    DEFAULT_PROMPTS,
    KernelSweep,
    attention_sweep,
    gemm_sweep,
)
from dakrun.lab.bench.model_sweep import ModelSweep, model_sweep
from dakrun.lab.output import Record

AnySweep = KernelSweep | ModelSweep

# By the subject that the command line names. Raise UsageError if an option is malformed.
SWEEPS: dict[str, Callable[..., AnySweep]] = {
    "gemm": gemm_sweep,
    "attention": attention_sweep,
    "prompt-attention": partial(attention_sweep, defaults=DEFAULT_PROMPTS),
    "model": model_sweep,
}


def check_device(sweep: AnySweep) -> None:
    """Raise CannotRun if the sweep needs a GPU, or a package, and there is none."""
    rival = sweep.rival if isinstance(sweep, KernelSweep) else None
    if rival and importlib.util.find_spec(rival) is None:
        raise CannotRun(
            f"--rival {rival} needs FlashInfer, which is not installed",
            hint="pip install 'dakrun[flashinfer]'",
        )
    if isinstance(sweep, KernelSweep) or sweep.rival is not None:
        import torch

        if not torch.cuda.is_available():
            raise CannotRun("this benchmark needs a CUDA GPU", hint="see: dakrun doctor")


def measure(
    sweep: AnySweep, profile: HardwareProfile, *, command: str, progress: Callable[[str], None]
) -> Iterator[Record]:
    """A record of all rows so far: once for a kernel, after each point of a model."""
    if isinstance(sweep, KernelSweep):
        from dakrun.lab.bench.kernel import measure_kernel

        yield measure_kernel(sweep, profile, command=command, progress=progress)
    else:
        from dakrun.lab.bench.model import measure_model

        yield from measure_model(sweep, profile, command=command, progress=progress)
