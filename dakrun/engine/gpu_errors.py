"""A GPU that fails in the middle of a run, told to people."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dakrun.errors import CannotRun, GpuFailed


@contextmanager
def gpu_errors() -> Iterator[None]:
    """CannotRun or GpuFailed in place of what torch, CuPy and the driver raise when CUDA fails."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise CannotRun(
            "the GPU's memory ran out",
            hint="lower --hbm-budget, --batch-size or --max-model-len, or end what else uses it",
        ) from None
    except RuntimeError as problem:
        first = str(problem).partition("\n")[0]
        if "cuda" not in first.lower():
            raise
        raise GpuFailed(
            f"the GPU failed: {first}",
            hint="what had finished is in the output, --resume goes on there; if it happens again, "
            "see: dakrun doctor",
        ) from problem
