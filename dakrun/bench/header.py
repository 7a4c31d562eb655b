"""The head of a benchmark's record: on what it was measured, when, and how to repeat it."""

import datetime
from collections.abc import Mapping
from typing import Any

import torch

import dakrun
from dakrun.bench.ceilings import Ceilings
from dakrun.hardware.files import cpu_name
from dakrun.hardware.profile import HardwareProfile
from dakrun.probe.machine import driver, visible_gpus


def head(
    what: Mapping[str, Any],
    dtype: str,
    ceilings: Ceilings,
    profile: HardwareProfile,
    command: str,
) -> dict[str, Any]:
    """Of torch's current GPU, or of the CPU where `profile` is of one.

    `what` says what was measured; the ceilings are by tier; `command` is the exact line.
    """
    on_gpu = profile.device == "cuda"
    return {
        **what,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "driver": driver(visible_gpus()).finding if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "dakrun": dakrun.__version__,
        "dtype": dtype,
        "ceilings_bytes_per_s": dict(ceilings.rates),
        "ceilings_measured": on_gpu,
        "copied_bytes_per_s": dict(ceilings.copied),
        "turning_point_ratio": ceilings.turning_point,
        "profile": profile.name,
    }
