"""Points of other programs: what they cannot do, or do not do here, is a problem in the result."""

import importlib.util

import torch

from dakrun.lab.evaluate.points import Result, StepPoint
from dakrun.lab.evaluate.scope import Scope


def rival(point: StepPoint, scope: Scope, device: torch.device) -> Result:
    """The decode step of the program `point.by`; CannotRun if it does not fit."""
    problem, ratio, again = None, point.ratio or 0.0, None
    if device.type != "cuda":
        problem = "needs a GPU"
    elif point.remote != "host" and ratio:
        problem = f"{point.by} offloads to host memory only"
    elif point.by == "transformers" and ratio:
        problem = "transformers keeps all in HBM"
    elif missing := _missing(point.by, scope):
        problem, again = f"{missing} is not installed", True
    if problem:
        return Result(source="measured", problem=problem, again=again)
    from dakrun.lab.rivals.steps import rival_step

    sizes = {name: getattr(point, name) for name in ("batch_size", "prompt_len", "new_tokens")}
    config, python = scope.models[point.model], scope.vllm_python
    step = rival_step(point.by, config, ratio=ratio, device=device, vllm_python=python, **sizes)
    return Result(
        source="measured",
        seconds=step.seconds,
        ratio=step.ratio,
        weight_bytes=step.weight_bytes,
        remote_bytes=step.ratio * step.weight_bytes,
        tokens_per_s=point.batch_size / step.seconds,
    )


def _missing(by: str, scope: Scope) -> str:
    """The package that the rival `by` needs and lacks, or an empty text."""
    if by.startswith("vllm"):
        from dakrun.lab.rivals.vllm import version

        return "" if scope.vllm_python and version(scope.vllm_python) else "vllm"
    packages = ("transformers", *(["accelerate"] if by == "accelerate" else []))
    return next((name for name in packages if importlib.util.find_spec(name) is None), "")
