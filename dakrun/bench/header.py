"""The head of a benchmark's record: on what it was measured, when, and how to repeat it."""

import datetime
from typing import Any

import torch

import dakrun
from dakrun.bench.ceilings import Ceilings
from dakrun.hardware import HardwareProfile
from dakrun.machine_checks import driver, visible_gpus


def head(
    kernel: str, dtype: str, ceilings: Ceilings, profile: HardwareProfile, command: str
) -> dict[str, Any]:
    """Of torch's current GPU; the ceilings are by tier; `command` is the exact line."""
    return {
        "kernel": kernel,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "driver": driver(visible_gpus()).finding,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "dakrun": dakrun.__version__,
        "dtype": dtype,
        "ceilings_bytes_per_s": dict(ceilings.rates),
        "turning_point_ratio": ceilings.turning_point,
        "profile": profile.name,
    }
