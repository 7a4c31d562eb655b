"""A step, one pass over the weights: the tokens that enter the model, and those chosen after them.

The engine makes steps, runners compute them. Knows neither the course of a request nor devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dakrun.config import SamplingParams
from dakrun.engine.adjustments import History
from dakrun.grammars import Guidance


class Sampling(NamedTuple):
    """How tokens of a request are chosen; `seed` is the request's (see sampler.request_seed).

    `history` has its tokens that are known so far, `limit` is the most new ones that it may have.
    With `guidance` only the tokens that it allows behind those of the history are chosen.
    """

    params: SamplingParams = SamplingParams()
    seed: int = 0
    history: History = History()
    limit: int = 0
    guidance: Guidance | None = None


class Row(NamedTuple):
    """The tokens of one request in a step: `length` of them enter `slot` from position `start` on.

    A part of a prompt has all its `tokens`. A decode row has none: its first token is the newest of
    the slot, which the CPU need not know, and up to `length` - 1 drafts follow, which the runner
    makes. Where earlier steps with drafts are in flight, it may begin later than at `start`. Logits
    are computed after the last `wanted` tokens of a part, 0 or 1, and after all of a decode row;
    the tokens of the next positions are chosen from them by `sampling`.
    `scored`, of a part whose log-probabilities are wanted, are the prompt's tokens behind the
    part's first token, behind its second and so on: as many as the part, one less at the end.
    """

    slot: int
    start: int
    sampling: Sampling = Sampling()
    length: int = 1
    tokens: Sequence[int] = ()
    wanted: int = 1
    scored: Sequence[int] = ()

    @property
    def last(self) -> int:
        """Position of the last of its tokens."""
        return self.start + self.length - 1


class Step(NamedTuple):
    """Decode rows, with all logits wanted, and parts of prompts; no slot is in two rows."""

    decode: Sequence[Row]
    prompts: Sequence[Row] = ()

    @property
    def rows(self) -> list[Row]:
        """All rows: those of `decode`, then those of `prompts`."""
        return [*self.decode, *self.prompts]

    @property
    def choosing(self) -> list[Row]:
        """The rows whose logits are wanted, in the order of `rows`."""
        return [*self.decode, *(row for row in self.prompts if row.wanted)]

    def by_row(self, chosen: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """Elements of `chosen`, one for each of `choosing`, by their row; () for the other rows."""
        first = len(self.decode)
        ends = iter(chosen[first:])
        return [*chosen[:first], *(next(ends) if row.wanted else () for row in self.prompts)]


Likeliest = list[tuple[int, float]]
"""A token, then the likeliest ones there, each with its log-probability."""


class Accepted(NamedTuple):
    """The tokens accepted for each row of a step, in order; NO_TOKEN if logits are not finite.

    A row gets the token after its own if its logits are wanted, else none; and as many more as its
    drafts foresaw. `logprobs`, empty if no row asks for them, are the log-probabilities of these
    tokens, of rows that ask. `scores`, empty if no row has `scored` tokens, are those of each row's
    `scored` tokens. `drafted`, empty if no row has drafts, counts those of each decode row.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[Likeliest]] = ()
    scores: Sequence[Sequence[Likeliest]] = ()
    drafted: Sequence[int] = ()
