"""KV blocks that are free at each later step if running requests end as they are expected to.

A quick estimate for requests that begin before their turn; for others admission counts blocks.
"""

import math
from collections.abc import Sequence

import numpy as np

from dakrun.engine.progress import RequestState
from dakrun.geometry import KV_BLOCK

DEVIATIONS = 3


class RoomAhead:
    """Positions for further requests in `blocks` KV blocks, up to each of their ends.

    Request i has held[i] positions now, and ends with held[i] + remaining[i]; each step adds one to
    all. Half of every last block counts as full, and a little more: DEVIATIONS standard deviations
    of what the last blocks of as many requests hold. A further request is expected to have `part`
    of the new tokens that it may have, and keeps its blocks for `late` steps behind them. Before it
    begins to grow, `tokens` of prompts are computed, and its own, `step_tokens` in a step.
    """

    def __init__(
        self,
        held: Sequence[int],
        remaining: Sequence[int],
        blocks: int,
        *,
        part: float = 1.0,
        tokens: int = 0,
        step_tokens: int = 1 << 30,
        late: int = 0,
    ) -> None:
        self._part, self._late = part, late
        self._tokens, self._step_tokens = tokens, step_tokens
        ends = np.asarray(remaining, dtype=np.int64)
        steps = np.arange(1 + ends.max(initial=0))
        here, counts = np.zeros_like(steps), np.zeros_like(steps)
        np.add.at(here, ends, np.asarray(held, dtype=np.int64))
        np.add.at(counts, ends, 1)
        counts = counts[::-1].cumsum()[::-1]  # of requests that end then or later
        positions = here[::-1].cumsum()[::-1] + counts * steps
        last = (counts + 1) * KV_BLOCK / 2 + DEVIATIONS * KV_BLOCK * np.sqrt((counts + 1) / 12)
        self._free = blocks * KV_BLOCK - positions - last
        self._behind = float((blocks - 1) * KV_BLOCK)  # behind the last end
        self._count()

    def fits(self, prompt: int, new: int, *, ends_early: bool = True) -> bool:
        """Whether there is room for a request of `prompt` tokens, with `new` ones at most.

        Unless it may end early, it has all of them.
        """
        wait = self._wait(prompt)
        steps = wait + self._steps(new, ends_early)
        room = float(self._least[min(steps, len(self._least) - 1)])
        if steps >= len(self._least):
            room = min(room, self._behind - steps)
        return max(0, prompt - wait) <= room

    def take(self, prompt: int, new: int, *, ends_early: bool = True) -> None:
        """Count a request that has begun."""
        wait = self._wait(prompt)
        steps = np.arange(min(wait + self._steps(new, ends_early) + 1, len(self._free)))
        self._free[: len(steps)] -= max(0, prompt - wait) + steps + KV_BLOCK / 2
        self._behind -= prompt + new + KV_BLOCK
        self._tokens += prompt
        self._count()

    def _wait(self, prompt: int) -> int:
        """Steps until a prompt is computed."""
        return (self._tokens + prompt) // self._step_tokens

    def _steps(self, new: int, ends_early: bool) -> int:
        """Steps behind a request's first new token until it gives its blocks back."""
        expected = max(KV_BLOCK, math.ceil(self._part * new)) if ends_early else new
        return max(0, min(new, expected) - 1) + self._late

    def _count(self) -> None:
        """The most positions of a prompt by the last step of its request."""
        self._least = np.minimum.accumulate(self._free - np.arange(len(self._free)))


class RoomsAhead:
    """RoomAhead by tier, and the free slots there."""

    def __init__(self, tiers: dict[int, tuple[int, RoomAhead]]) -> None:
        self._tiers = tiers

    def fit(self, prompt: int, new: int) -> bool:
        """Whether a tier has room for a request of `prompt` tokens, with `new` ones at most."""
        return any(room.fits(prompt, new) for _, room in self._tiers.values())

    def has(self, tier: int, r: RequestState) -> bool:
        """Whether there is room for `r` in a slot of a `tier`."""
        room = self._tiers.get(tier)
        own = len(r.prompt) - r.shared
        return room is not None and room[1].fits(own, r.limit, ends_early=r.may_end_early)

    def take(self, tier: int, r: RequestState) -> None:
        """Count `r`, which has begun in a slot of a `tier`."""
        slots, room = self._tiers.pop(tier)
        if slots > 1:
            room.take(len(r.prompt) - r.shared, r.limit, ends_early=r.may_end_early)
            self._tiers[tier] = slots - 1, room
