"""A GPU that fails in the middle of a run, told to people."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dakrun.errors import CannotRun


@contextmanager
def gpu_errors() -> Iterator[None]:
    """CannotRun in place of what torch, CuPy and the driver raise when CUDA fails."""
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
        sys.unraisablehook = _but_for_cuda
        raise CannotRun(
            f"the GPU failed: {first}",
            hint="what had finished is in the output, --resume goes on there; if it happens again, "
            "see: dakrun doctor",
        ) from problem


def _but_for_cuda(problem: Any, tell: Callable[[Any], None] = sys.__unraisablehook__) -> None:
    """Says nothing of destructors that find what has been told already: CUDA fails from then on.

    Modules may be gone when they run, so all that this needs are its arguments.
    """
    if "CUDA" not in type(problem.exc_value).__name__:
        tell(problem)
