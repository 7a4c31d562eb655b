"""Admission: which requests get a slot and KV blocks, and when.

A request gets a slot if the KV blocks of its tier suffice for it and all requests that run there,
up to their expected ends. Knows slots, blocks and lengths; neither steps nor tokens.
"""

import bisect
from collections import Counter
from collections.abc import Sequence

from dakrun.engine.kv_cache import KVCache
from dakrun.engine.prefix_cache import block_names
from dakrun.engine.progress import NO_SLOT, RequestState
from dakrun.engine.room_ahead import RoomAhead, RoomsAhead
from dakrun.geometry import KV_BLOCK
from dakrun.plan import blocks_suffice

ENDED_TO_EXPECT = 32  # requests that have ended before others are expected to end like them


class Admission:
    """The slots of `cache`, filled in the given `order`, and the blocks that their requests need.

    `blocked`: the next request finds no KV blocks until another one gives its blocks back, which it
    does `late` steps behind its end: so many steps are launched ahead. A step computes
    `step_tokens` of prompts.
    """

    def __init__(
        self, cache: KVCache, order: Sequence[int], step_tokens: int = 1 << 30, late: int = 0
    ) -> None:
        self._cache, self._step_tokens, self._late = cache, step_tokens, late
        self._order = {slot: number for number, slot in enumerate(order)}
        self.reset()

    def reset(self) -> None:
        """Begin a run: all slots are free, and no request has ended."""
        self.blocked = False
        self._free = list(self._order)  # slots, in the order in which to fill them
        self._at_ends = [0] * len(
            self._cache.counts
        )  # blocks by tier, of its requests at their ends
        self._ended, self._ended_parts = 0, 0.0  # see _expected_part

    @property
    def is_open(self) -> bool:
        """Whether the next request may be admitted: a slot is free, and blocks may be."""
        return bool(self._free) and not self.blocked

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._order)

    @property
    def most_positions(self) -> int:
        """Positions of the longest request for which the empty cache has blocks."""
        blocks = self._cache.blocks
        return max(*blocks, blocks[0] + self._cache.spill_blocks) * KV_BLOCK

    def admit(
        self,
        r: RequestState,
        running: Sequence[RequestState],
        beginning: Sequence[RequestState],
        ahead: RoomsAhead | None = None,
    ) -> bool:
        """Give `r` a slot and the blocks of its prompt; False if there is no room.

        There is room in a tier if its blocks suffice for all its requests until they end, with as
        many new tokens as each is expected to have. Requests in slots are `running` or `beginning`.
        If there is no room, `blocked` is set until one of them ends.

        With `ahead`, from rooms_ahead(), they need only suffice until `r` ends, and it is counted
        there.
        """
        cache = self._cache
        # Blocks of other requests would leave their positions without scores.
        names = () if r.is_scored else block_names(r.prompt)
        tried: set[int] = set()  # tiers
        for slot in self._free:
            if cache.tier(slot) in tried:
                continue
            tried.add(cache.tier(slot))
            r.slot, r.names, r.spilled = slot, names, 0
            self._share(r)
            if ahead:
                found = ahead.has(cache.tier(slot), r) and cache.reserve(slot, len(r.prompt))
            else:
                found = self._has_room(r, running, beginning) and cache.reserve(slot, len(r.prompt))
                if not found:
                    cache.release(slot)
                    found = self._spill(r) and cache.reserve(slot, len(r.prompt))
            if found:
                self._free.remove(slot)
                self._at_ends[cache.tier(slot)] += r.blocks_at_end
                if ahead:
                    ahead.take(cache.tier(slot), r)
                return True
            cache.release(slot)
            if len(tried) == len(cache.counts):
                break
        r.slot = NO_SLOT
        self.block()
        return False

    def block(self) -> None:
        """Admit none until a request gives its blocks back, if one has a slot."""
        self.blocked = len(self._free) < len(self._order)

    def share_more(self, r: RequestState) -> None:
        """Give `r`, before the first part of its prompt, blocks computed since its admission."""
        before = r.blocks_at_end
        self._share(r)
        if r.blocks_at_end < before:
            self._at_ends[self._cache.tier(r.slot)] += r.blocks_at_end - before
            self.blocked = False

    def release(self, r: RequestState) -> None:
        """Take `r` out of its slot; steps already launched for it have no effect."""
        tier = self._cache.tier(r.slot)
        self._cache.release(r.slot)
        self._at_ends[tier] -= r.blocks_at_end
        bisect.insort(self._free, r.slot, key=self._order.__getitem__)
        r.slot, self.blocked = NO_SLOT, False

    def count_end(self, r: RequestState) -> None:
        """Expect others to end like `r`, which has ended."""
        if r.may_end_early:
            self._ended += 1
            self._ended_parts += len(r.tokens) / r.limit

    def _has_room(
        self, new: RequestState, running: Sequence[RequestState], beginning: Sequence[RequestState]
    ) -> bool:
        """Whether the tier's blocks suffice for its requests and `new`, up to expected ends."""
        tier = self._cache.tier(new.slot)
        room = self._room(tier)
        if self._at_ends[tier] + new.blocks_at_end <= room:
            return True
        return blocks_suffice(*self._growth(tier, running, (*beginning, new)), room)

    def rooms_ahead(
        self, running: Sequence[RequestState], beginning: Sequence[RequestState]
    ) -> RoomsAhead:
        """The room for further requests in each tier that has a free slot."""
        slots = Counter(map(self._cache.tier, self._free))
        part = self._expected_part(running)
        tokens = sum(len(r.prompt) - r.cached for r in beginning)
        return RoomsAhead({
            tier: (
                count,
                RoomAhead(
                    *self._growth(tier, running, beginning), self._room(tier), part=part,
                    tokens=tokens, step_tokens=self._step_tokens, late=self._late,
                ),
            )
            for tier, count in slots.items()
        })  # fmt: skip

    def _growth(
        self, tier: int, running: Sequence[RequestState], beginning: Sequence[RequestState]
    ) -> tuple[list[int], list[int]]:
        """Positions in blocks of their own that a tier's requests have, and those to be added.

        As if those `beginning`, whose prompts wait for w steps, had w positions less and added one
        in each of these steps, too: they end as much later. All grow until they give blocks back.
        """
        part, tokens = self._expected_part(running), 0
        held = [(r, r.cached, 0) for r in running]  # positions with blocks
        for r in beginning:
            tokens += len(r.prompt) - r.cached
            held.append((r, len(r.prompt), tokens // self._step_tokens))
        here = [one for one in held if self._cache.tier(one[0].slot) == tier]
        own = [max(0, n - r.shared - r.spilled * KV_BLOCK - wait) for r, n, wait in here]
        return own, [_expected(r, n, part) + wait + self._late for r, n, wait in here]

    def _expected_part(self, running: Sequence[RequestState]) -> float:
        """Expected new tokens of a request that may end early, as a fraction of its limit.

        The tokens of all requests so far, each as a fraction of its limit, over the number of
        requests that have ended: the likeliest mean if the chance to end is equal at every token.
        1 until ENDED_TO_EXPECT have ended.
        """
        if self._ended < ENDED_TO_EXPECT:
            return 1.0
        parts = sum((r.limit - r.end + r.cached) / r.limit for r in running if r.may_end_early)
        return min(1.0, (self._ended_parts + parts) / self._ended)

    def _room(self, tier: int) -> int:
        """Blocks of a tier for requests in its slots, besides those that are shared by now."""
        cache = self._cache
        return cache.blocks[tier] - cache.borrowed(tier) - (cache.spill_blocks if tier == 1 else 0)

    def _spill(self, new: RequestState) -> bool:
        """Put leading blocks of `new`, for which its tier has no room, into the remote tier.

        As few blocks as possible. False if the plan has no such room, or if others have taken it.
        """
        cache = self._cache
        if not cache.spill_blocks or cache.tier(new.slot):
            return False
        new.names, new.shared, new.cached = (), 0, 0
        missing = new.blocks_at_end - max(0, self._room(0) - self._at_ends[0])
        if missing <= 0 or not cache.spill(new.slot, missing):
            return False
        new.spilled = missing
        return True

    def _share(self, r: RequestState) -> None:
        """Give `r` the leading blocks of its prompt that are in its tier.

        The last token of a prompt is computed in any case, unless `r` goes on from copies: the next
        token follows from it.
        """
        usable = r.names[: (len(r.prompt) - (r.saved is None)) // KV_BLOCK]
        r.shared = r.cached = self._cache.share(r.slot, usable) * KV_BLOCK


def _expected(r: RequestState, held: int, part: float) -> int:
    """Positions that `r`, with blocks for `held`, is expected to add: to `part` of its limit.

    At least a block, even where `r` is past the expected end; at most what it may add.
    """
    most = r.end - held
    if part >= 1.0 or not r.may_end_early:
        return most
    return min(most, max(KV_BLOCK, most - r.limit + round(part * r.limit)))
