"""Swap space: host memory for the KV blocks of requests that have given up their slots.

A thread takes its memory when copies are first wanted. Copies run beside the steps. Knows slots
and blocks, neither tokens nor the scheduler.
"""

import threading
from dataclasses import dataclass, field

import torch

from dakrun.engine.kv_cache import KVCache
from dakrun.errors import CannotRun
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.runtime import CopyStream
from dakrun.memory.tiers import HOST, Tier
from dakrun.plan import Links, Plan, pass_seconds
from dakrun.units import ceil_div

MAX_BYTES = 4 << 30  # takes a second to page-lock
LOCAL_PART = 4  # at most a quarter of the local tier's KV blocks


@dataclass(eq=False)
class Saved:
    """The leading KV blocks of a request, by their numbers in the swap space."""

    blocks: list[int] = field(default_factory=list)


class SwapSpace:
    """Room for `blocks` KV blocks of `cache` in host memory, once `open` has made it."""

    def __init__(self, cache: KVCache, blocks: int) -> None:
        self._cache, self.size = cache, blocks
        self._copies = CopyStream(cache.device)
        self._opening: threading.Thread | None = None
        self._tier: Tier | None = None
        self._room: torch.Tensor | None = None  # uint8 [blocks, layers, layer_bytes]
        self._free: list[int] = []

    @classmethod
    def of(cls, cache: KVCache, plan: Plan) -> "SwapSpace":
        """Room in the host memory that `plan` leaves: at most 4 GiB, and a quarter of local KV.

        There is none if the plan has no host tier.
        """
        left = 0
        if HOST in plan.tiers:
            tier = plan.tiers.index(HOST)
            left = min(MAX_BYTES, plan.budgets[tier] - sum(plan.memory(tier).values()))
        return cls(cache, min(max(0, left) // plan.kv_block_bytes, cache.blocks[0] // LOCAL_PART))

    @property
    def free(self) -> int:
        """Blocks for which there is room now."""
        return len(self._free)

    def open(self) -> None:
        """Begin to take the memory, if this is the first call. Until it is there, `save` fails."""
        if self._opening is None and self.size:
            self._opening = threading.Thread(target=self._take, name="swap space", daemon=True)
            self._opening.start()

    def wait(self) -> None:
        """Wait until the memory is there, if it is being taken."""
        if self._opening is not None:
            self._opening.join()

    def close(self) -> None:
        """Give the memory back. All copies must be complete. `open` has no effect from now on."""
        self.wait()
        self._room, self._free, self.size = None, [], 0
        if self._tier is not None:
            self._tier.close()

    def save(self, saved: Saved, slot: int, count: int) -> bool:
        """Start to copy the first `count` blocks of `slot`, besides those that `saved` has already.

        Copies follow the steps launched so far; nothing may be written to these blocks later.
        False, and no copy, if there is not enough room.
        """
        room, more = self._room, count - len(saved.blocks)
        if room is None or more > self.free:
            return False
        first = len(saved.blocks)
        saved.blocks += [self._free.pop() for _ in range(more)]
        self._copies.follow()
        for number, index in enumerate(saved.blocks[first:], first):
            self._copies.copy((room[index], self._cache.block(slot, number)))
        return True

    def wait_for_copies(self) -> None:
        """Let later steps wait for all copies so far."""
        self._copies.join()

    def restore(self, saved: Saved, slot: int, first: int) -> torch.cuda.Event | None:
        """Start to copy the blocks from number `first` on back to `slot`; free all of `saved`.

        Copies follow the steps launched so far. Returns the event of their end, None on a CPU.
        """
        assert self._room is not None, "nothing is saved before there is room"
        self._copies.follow()
        for number, index in enumerate(saved.blocks[first:], first):
            self._copies.copy((self._cache.block(slot, number), self._room[index]))
        self.drop(saved)  # a later save() to this room comes after these copies
        return self._copies.copied()

    def drop(self, saved: Saved) -> None:
        """Free the room of `saved`."""
        if self._room is not None:
            self._free += saved.blocks
        saved.blocks = []

    def _take(self) -> None:
        """Take the memory; there is no swap space if the machine does not have it."""
        shape = (self.size, *self._cache.parts[0].shape[1:])
        try:
            tier = Tier(HOST, torch.Size(shape).numel(), self._cache.device)
        except CannotRun:
            return
        self._tier, self._free = tier, list(range(self.size))
        self._room = tier.allocate(shape, torch.uint8)


def swap_beats_recompute(plan: Plan, positions: int) -> bool:
    """Whether copying `positions` to host memory and back takes less time than computing them.

    The time of copies is 2 C / B_copy: C bytes of their KV blocks, at the copy engine's rate, as if
    nothing ran beside them. False without a host tier.
    """
    copied = 2 * ceil_div(positions, KV_BLOCK) * plan.kv_block_bytes
    rate = Links.of(plan.profile, (HOST,)).staged[HOST] if HOST in plan.tiers else 0.0
    computed = pass_seconds(plan, 0, 1, [((0, positions), 1)], 0.0)
    return rate > 0 and copied / rate < computed
