"""Points of other programs: what they cannot do, or do not do here, is a problem in the result."""

import importlib.util

import torch

from dakrun.config import ModelConfig
from dakrun.lab.evaluate.points import Result, StepPoint


def rival(point: StepPoint, config: ModelConfig, device: torch.device) -> Result:
    """The decode step of the program `point.by`; CannotRun if it does not fit."""
    problem, ratio, again = None, point.ratio or 0.0, None
    if device.type != "cuda":
        problem = "needs a GPU"
    elif point.remote != "host" and ratio:
        problem = f"{point.by} offloads to host memory only"
    elif point.by == "transformers" and ratio:
        problem = "transformers keeps all in HBM"
    elif importlib.util.find_spec("transformers" if point.by == "prefetch" else point.by) is None:
        problem, again = f"{point.by} is not installed", True
    if problem:
        return Result(source="measured", problem=problem, again=again)
    from dakrun.lab.rivals.steps import rival_step

    sizes = {name: getattr(point, name) for name in ("batch_size", "prompt_len", "new_tokens")}
    step = rival_step(point.by, config, ratio=ratio, device=device, **sizes)
    return Result(
        source="measured",
        seconds=step.seconds,
        ratio=step.ratio,
        weight_bytes=step.weight_bytes,
        remote_bytes=step.ratio * step.weight_bytes,
        tokens_per_s=point.batch_size / step.seconds,
    )
