"""The interface between engine and runners: prefill, decode steps, and their tokens.

graph_runner.py has the runner of the GPU's kernels, reference_runner.py that of plain torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from dakrun.config import SamplingParams
from dakrun.engine.sampler import sample
from dakrun.errors import GpuFailed
from dakrun.memory.device import is_out_of_memory, out_of_memory
from dakrun.memory.tiers import LOCAL_HINT
from dakrun.plan import Segment


class Row(NamedTuple):
    """A request's row in a decode step.

    Its newest token, number `step` of the generated ones, enters `slot` at `position`. The next
    token is drawn with `params` and `seed`.
    """

    slot: int
    position: int
    step: int
    params: SamplingParams
    seed: int


class Runner(Protocol):
    """A model in its tiers, with slots for requests.

    `order` lists the slots in the order in which to fill them. Up to `ahead` steps may be launched
    before the tokens of the oldest are collected. A pass of prefill takes up to `chunk_tokens`.
    """

    order: Sequence[int]
    ahead: int
    chunk_tokens: int

    def op_seconds(self, length: int) -> Mapping[str, float]:
        """Seconds of a decode step by op, as far as known, with all slots `length` positions long.

        No request may be running.
        """
        ...

    def details(self) -> dict[str, Any]:
        """Further facts for the report, JSON-ready."""
        ...

    def prefill(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Cache the concatenated tokens of all segments; logits [S, V] after each segment."""
        ...

    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Give slots their first generated tokens, which the next decode step starts from."""
        ...

    def launch(self, rows: Sequence[Row]) -> None:
        """Start a decode step: the newest token of every row goes in, its next one comes out."""
        ...

    def collect(self) -> list[int]:
        """The tokens of the oldest step that was launched, in the order of its rows; waits."""
        ...

    def drop(self) -> None:
        """Forget the tokens of all steps that were launched; waits for them."""
        ...


class Chosen:
    """The next tokens of some rows, on their way from the device."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Start `choose` on logits [n, V] without waiting for it."""
        chosen = choose(logits, rows)
        self._ready: torch.cuda.Event | None = None
        self._tokens = chosen
        if chosen.is_cuda:
            kept = torch.empty(len(rows), dtype=chosen.dtype, pin_memory=True)
            self._tokens = kept.copy_(chosen, non_blocking=True)
            self._ready = torch.cuda.current_stream().record_event()

    def tokens(self) -> list[int]:
        """The tokens in the order of the rows; waits."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._tokens.tolist()  # type: ignore[no-any-return]


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """The next token of each row, int64 [n], from logits [n, V]."""
    return sample(logits, [r.params for r in rows], [r.seed for r in rows], [r.step for r in rows])


@contextmanager
def gpu_errors() -> Iterator[None]:
    """Turn CUDA errors of torch, CuPy and the driver into OutOfGpuMemory or GpuFailed."""
    try:
        yield
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise out_of_memory(problem, hint=LOCAL_HINT) from None
        first = str(problem).partition("\n")[0]
        if "cuda" not in first.lower():
            raise
        raise GpuFailed(
            f"the GPU failed: {first}",
            hint="finished rows are in the output, continue with --resume; if it happens again, "
            "see: dakrun doctor",
        ) from problem
