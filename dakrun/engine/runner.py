"""The interface between the engine and runners, which compute its steps (step.py).

graph_runner.py has the runner of the GPU's kernels, reference_runner.py that of plain torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch

from dakrun.engine.expert_use import ExpertUse
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.logprobs import log_probabilities
from dakrun.engine.step import Accepted, Likeliest, Row, Step
from dakrun.errors import GpuFailed
from dakrun.memory.device import download, is_out_of_memory, out_of_memory, upload
from dakrun.memory.tiers import LOCAL_HINT
from dakrun.plan import DraftForecast


class Runner(Protocol):
    """A model in its tiers, with slots for requests and blocks for their keys and values.

    A slot needs blocks of `cache` for all positions that a pass or step reads and writes. `order`
    lists the slots in the order in which to fill them. Up to `ahead` steps may be launched before
    the tokens of the oldest are collected. A step takes up to `chunk_tokens` tokens of prompts.
    `expert_use` counts the choices of routers; None if the model has none, or they are not counted.
    With `moves_experts` experts are exchanged as a run goes.
    """

    cache: KVCache
    order: Sequence[int]
    ahead: int
    chunk_tokens: int
    expert_use: ExpertUse | None
    moves_experts: bool

    def draft(self, forecasts: Sequence[DraftForecast]) -> None:
        """Prepare for steps that carry as many drafted tokens of a row as `forecasts` say."""
        ...

    def rehearse(self) -> None:
        """Run a short request, so that the first real one does not wait for kernels to be loaded.

        No request may be running.
        """
        ...

    def op_seconds(self, length: int) -> Mapping[str, float]:
        """Seconds of a decode step by op, as far as known, with all slots `length` positions long.

        No request may be running.
        """
        ...

    def details(self) -> dict[str, Any]:
        """Further facts for the report, JSON-ready."""
        ...

    def tokens_beside(self, slots: Sequence[int], width: int) -> int:
        """Tokens that a pass computes for rows of `slots`, of up to `width` tokens each.

        Those of idle rows are included.
        """
        ...

    def launch(self, step: Step) -> None:
        """Start a step. The tokens that it chooses become the newest of their slots.

        A decode row carries up to `length` - 1 tokens that the runner drafts.
        """
        ...

    def resume(self, row: Row) -> None:
        """Let the token of `row` be the newest of its slot, which is filled up to `row.start`."""
        ...

    def has_ended(self) -> bool:
        """Whether the oldest step has ended, so that a device soon waits for the next one."""
        ...

    def collect(self) -> Accepted:
        """The tokens accepted in the oldest step; waits for them."""
        ...

    def drop(self) -> None:
        """Forget the tokens of all steps that were launched; waits for them."""
        ...


class Chosen:
    """The tokens chosen in a step and their log-probabilities, on their way from the device."""

    def __init__(
        self,
        logits: torch.Tensor,
        step: Step,
        tokens: torch.Tensor,
        counts: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Start to read `tokens`, integers [n], chosen from logits [n, V], without waiting.

        `counts` has the number of tokens of each of the step's rows `choosing`, by default one;
        `numbers` says which of the n they are, by default all in order.
        """
        self._step, rows = step, step.choosing
        self._counts = [1] * len(rows) if counts is None else counts
        tops = (row.sampling.params.logprobs for row in rows)
        each = zip(tops, self._counts, strict=True)
        by_token = (top for top, count in each for _ in range(count))
        self._asked = {i: top for i, top in enumerate(by_token) if top is not None}
        at = range(len(tokens)) if numbers is None else numbers
        parts = [tokens if numbers is None else tokens[upload(torch.tensor(at), tokens.device)]]
        if self._asked:
            asked = upload(torch.tensor([at[i] for i in self._asked]), logits.device)
            chosen = tokens[asked].long().clamp(min=0)
            parts += log_probabilities(logits[asked], chosen, max(self._asked.values()))
        self._parts = [download(part) for part in parts]
        self._ready = torch.cuda.current_stream().record_event() if logits.is_cuda else None

    def collect(self) -> Accepted:
        """The tokens and log-probabilities; waits."""
        if self._ready is not None:
            self._ready.synchronize()
        tokens, *found = (part.tolist() for part in self._parts)
        likeliest: list[list[Likeliest]] = [[] for _ in tokens]
        for (number, top), ids, values in zip(self._asked.items(), *found, strict=True):
            likeliest[number].append(list(zip(ids, values, strict=True))[: 1 + top])
        by_row, numbers = self._step.by_row, iter(range(len(tokens)))
        mine = [list(islice(numbers, count)) for count in self._counts]
        return Accepted(
            by_row([[tokens[i] for i in own] for own in mine]),
            by_row([[one for i in own for one in likeliest[i]] for own in mine]),
        )


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
