"""The interface between engine and runners: steps of decode rows and prompts, and their tokens.

graph_runner.py has the runner of the GPU's kernels, reference_runner.py that of plain torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from dakrun.config import SamplingParams
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.logprobs import log_probabilities
from dakrun.engine.sampler import sample
from dakrun.errors import GpuFailed
from dakrun.memory.device import download, is_out_of_memory, out_of_memory, upload
from dakrun.memory.tiers import LOCAL_HINT


class Row(NamedTuple):
    """A request's row in a step.

    Its newest token enters `slot` at `position`, which for a prompt is that of its last token. The
    token of the next position is chosen with `params` and `seed`.
    """

    slot: int
    position: int
    params: SamplingParams
    seed: int


class PromptPart(NamedTuple):
    """Tokens of the prompt of `row`, which enter its slot from position `start` on.

    If the prompt `ends` with them, the row's first token is chosen.
    """

    row: Row
    start: int
    tokens: Sequence[int]
    ends: bool


class NextTokens(NamedTuple):
    """The next tokens of some rows, in the order of the rows; NO_TOKEN where there is none.

    `logprobs` has those of the rows that ask for them, by the row's number: the row's token, then
    the likeliest tokens, each with its log-probability.
    """

    tokens: list[int]
    logprobs: Mapping[int, list[tuple[int, float]]] = MappingProxyType({})


class Runner(Protocol):
    """A model in its tiers, with slots for requests and blocks for their keys and values.

    A slot needs blocks of `cache` for all positions that a pass or step reads and writes. `order`
    lists the slots in the order in which to fill them. Up to `ahead` steps may be launched before
    the tokens of the oldest are collected. A step takes up to `chunk_tokens` tokens of prompts.
    """

    cache: KVCache
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

    def launch(self, rows: Sequence[Row], parts: Sequence[PromptPart] = ()) -> None:
        """Start a step: one pass over the weights for decode rows and parts of prompts.

        The newest token of every row goes in, its next one comes out. Keys and values of the parts
        are cached; a prompt that ends gives its row's first token, from which the next step starts.
        """
        ...

    def resume(self, row: Row, token: int) -> None:
        """Let `token` be the newest of the row's slot, whose blocks are filled up to it."""
        ...

    def collect(self) -> NextTokens:
        """The tokens of the oldest step, of its rows, then of the prompts that ended; waits."""
        ...

    def drop(self) -> None:
        """Forget the tokens of all steps that were launched; waits for them."""
        ...


class Chosen:
    """The next tokens of some rows and their log-probabilities, on their way from the device."""

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[Row], tokens: torch.Tensor | None = None
    ) -> None:
        """Start to choose from logits [n, V], without waiting for the result.

        `tokens`, integers [n] on the device, are those that were chosen already.
        """
        params = [row.params for row in rows]
        if tokens is None:
            positions = [row.position + 1 for row in rows]
            tokens = sample(logits, params, [row.seed for row in rows], positions)
        self._asked = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        parts = [tokens]
        if self._asked:
            numbers = upload(torch.tensor(list(self._asked)), logits.device)
            chosen = tokens[numbers].long().clamp(min=0)
            parts += log_probabilities(logits[numbers], chosen, max(self._asked.values()))
        self._parts = [download(part) for part in parts]
        self._ready = torch.cuda.current_stream().record_event() if logits.is_cuda else None

    def collect(self) -> NextTokens:
        """The tokens and log-probabilities; waits."""
        if self._ready is not None:
            self._ready.synchronize()
        tokens, *likeliest = (part.tolist() for part in self._parts)
        found = (
            {
                row: list(zip(ids, values, strict=True))[: 1 + top]
                for (row, top), ids, values in zip(self._asked.items(), *likeliest, strict=True)
            }
            if likeliest
            else {}
        )
        return NextTokens(tokens, found)


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
