"""Masks of allowed tokens for the GPU's steps, written by a thread while the GPU works.

In a step, the kernel that chooses the token of a guided slot waits until the slot's mask is there
(kernels/select_token.py). The thread reads the tokens that steps have chosen from their log, lets
each slot's guide go on, and writes the next mask. It makes no CUDA call: those could wait for a
kernel that waits for the thread.
"""

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dakrun.grammars import Guide, ParallelGuides
from dakrun.kernels import TokenMask, mask_words
from dakrun.memory.limits import usable_cores

NOT_YET = -3  # in the log, instead of a token that has not been chosen yet
# Between looks at the log: an eighth of the time that has passed since something was found there,
# within limits. Each look takes Python's lock from the threads that launch steps and write results.
POLL_S, MAX_POLL_S = 100e-6, 1e-3
SWITCH_S = 500e-6  # the thread gets that lock within this time, several times for each mask
END_WAITS = -1  # the counter of a slot where no step waits


@dataclass
class _Guided:
    """A slot's guide, and the `position` of the token that it waits for, or of its first mask.

    base + position is the slot's counter once that mask is there. Steps launched before turn number
    `turn` may still write to the slot's log. `forced` has the position of the next token, and the
    tokens from there on to which the grammar leaves no alternative.
    """

    guide: Guide
    base: int
    position: int
    turn: int
    forced: tuple[int, Sequence[int]] = (0, ())


class MaskWriter:
    """The masks of `slots` slots, and the thread that writes them while any slot is guided.

    `log` is int32 [slots, depth] in page-locked memory: the token chosen for position p of a slot
    is written to log[slot, (p - 1) % depth]. Steps in flight choose up to `ahead` tokens of a slot.

    A step that begins a guide is launched in this order: `begin`; `announce`, in the order of the
    stream; the launches. Steps in flight from before have then written what they had to write to
    the log when the thread reads the announcement.
    """

    def __init__(self, log: torch.Tensor, vocabulary: int, ahead: int) -> None:
        slots, self._depth = log.shape
        self._log = log.numpy().reshape(-1)
        self._slots, self._words, self.ahead = slots, mask_words(vocabulary), ahead
        self.forces = False  # whether to look for forced tokens
        self._floor = [0] * slots  # no step in flight waits for more than that
        self._guided: dict[int, _Guided] = {}
        self._begun: dict[int, _Guided] = {}  # by the main thread, not yet seen by the other
        self._turn = 0
        self._watched: tuple[list[tuple[int, _Guided]], np.ndarray] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._masks: torch.Tensor | None = None

    def begin(self, slot: int, guide: Guide, position: int) -> TokenMask:
        """Let `guide` say which tokens are allowed in `slot` from `position` on.

        Returns where the kernel finds the masks. Raises what has ended the thread.
        """
        self.check()
        if self._masks is None:
            self._allocate()
        assert self._masks is not None
        with self._lock:
            floor = self._end(slot) + 1
            self._counters[slot] = floor
            base = floor + 1 - position
            self._begun[slot] = _Guided(guide, base, position, self._turn + 1)
        if self._thread is None:
            self._stop.clear()
            self._switch_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, self._switch_s))
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()
        bits = self._masks.data_ptr() + slot * self._words * 4
        return TokenMask(bits, self._ready.data_ptr() + slot * 4, base)

    def announce(self) -> None:
        """Tell the thread, in the order of the stream, that what was launched before is done."""
        if self._begun:
            self._turn += 1
            self._device_turn.fill_(self._turn)
            self._reached.copy_(self._device_turn, non_blocking=True)

    def forced(self) -> dict[int, tuple[int, Sequence[int]]]:
        """By slot, the first position and the tokens to which its grammar has no alternative."""
        guided = list(self._guided.items())
        return {slot: one.forced for slot, one in guided if one.forced[1]}

    def release_failed(self, chosen: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Release the slots among `chosen`, with their new tokens, that got no token.

        The thread may not know of them: if logits are not finite, the kernel waits for no mask.
        """
        if self._guided:
            for slot in [slot for slot, tokens in chosen if tokens and min(tokens) < 0]:
                self.release(slot)

    def release(self, slot: int) -> None:
        """Let no step wait for the slot's masks; they are no longer written."""
        if slot in self._guided or slot in self._begun:
            with self._lock:
                self._end(slot)
                self._counters[slot] = END_WAITS

    def release_all(self) -> None:
        """Release all slots, and end the thread."""
        if self._masks is None:
            return
        with self._lock:
            for slot in (*self._guided, *self._begun):
                self._end(slot)
            self._counters[:] = END_WAITS
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._switch_s)
        self._problem = None

    def check(self) -> None:
        """Raise what has ended the thread, if anything has."""
        if self._problem is not None:
            raise RuntimeError("the masks of grammars could not be written") from self._problem

    def _allocate(self) -> None:
        """Page-locked memory, with the first guide: no step may be waiting for a mask."""
        pinned = torch.cuda.is_available()
        self._masks = torch.zeros(self._slots, self._words, dtype=torch.int32, pin_memory=pinned)
        self._ready = torch.full((self._slots,), END_WAITS, dtype=torch.int32, pin_memory=pinned)
        self._reached = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self._device_turn = torch.zeros(1, dtype=torch.int32, device="cuda" if pinned else "cpu")
        self._bits, self._counters = self._masks.numpy(), self._ready.numpy()
        self._turns = self._reached.numpy()

    def _end(self, slot: int) -> int:
        """Forget the slot's guide; the counter that ends all waits of its steps in flight."""
        self._watched = None
        for guided in (self._guided, self._begun):
            if (old := guided.pop(slot, None)) is not None:
                self._floor[slot] = max(self._floor[slot], old.base + old.position + self.ahead)
        return self._floor[slot]

    def _run(self) -> None:
        try:
            guides = ParallelGuides(max(1, usable_cores() - 1))
            found = time.perf_counter()
            while not self._stop.is_set():
                done = self._begin_some(guides) or self._go_on(guides)
                now = time.perf_counter()
                if done:
                    found = now
                else:
                    time.sleep(min(max(POLL_S, (now - found) / 8), MAX_POLL_S))
        except BaseException as problem:
            self._problem = problem
            with self._lock:
                self._counters[:] = END_WAITS

    def _begin_some(self, guides: ParallelGuides) -> bool:
        """Write the first masks of guides whose slots' logs are theirs by now; whether any was."""
        if not self._begun:
            return False
        with self._lock:
            reached = self._turns[0]
            first = {slot: one for slot, one in self._begun.items() if one.turn <= reached}
            for slot in first:
                self._guided[slot] = self._begun.pop(slot)
        if first:
            self._write(guides, first)
        return bool(first)

    def _go_on(self, guides: ParallelGuides) -> bool:
        """Write the next masks of slots whose tokens have been chosen; whether there were any."""
        waiting, indices = self._watched or self._watch()
        tokens = self._log[indices]
        if not len(waiting) or (tokens == NOT_YET).all():
            return False
        chosen = zip(waiting, tokens.tolist(), strict=True)
        ready = {slot: (one, token) for (slot, one), token in chosen if token != NOT_YET}
        guides.accept([(one.guide, token) for one, token in ready.values() if token >= 0])
        for one, _ in ready.values():
            one.position += 1
        for slot in [slot for slot, (_, token) in ready.items() if token < 0]:
            self.release(slot)  # its request ends with an error
            del ready[slot]
        self._write(guides, {slot: one for slot, (one, _) in ready.items()})
        return True

    def _write(self, guides: ParallelGuides, next_ones: dict[int, _Guided]) -> None:
        """Write the masks of `next_ones`, then their counters, where they are still guided."""
        guides.fill({slot: one.guide for slot, one in next_ones.items()}, self._bits)
        with self._lock:
            live = self._live(next_ones)
            self._log[self._indices(live)] = NOT_YET
        # A release and an acquire lie between masks and counters: a processor that reorders stores
        # (Arm) lets the GPU see them in this order.
        with self._lock:
            live = self._live(next_ones)
            for slot in [slot for slot, one in live.items() if one.guide.is_free]:
                self._end(slot)
                self._counters[slot] = END_WAITS
                del live[slot]
            slots = np.fromiter(live, dtype=np.int64, count=len(live))
            self._counters[slots] = [one.base + one.position for one in live.values()]
            self._watched = None
        if self.forces and live:
            self._force(live)

    def _force(self, next_ones: dict[int, _Guided]) -> None:
        """Find what follows where a mask has a single token."""
        masks = self._bits[list(next_ones)]
        single = (np.bitwise_count(masks).sum(1) == 1).tolist()
        for one, alone in zip(next_ones.values(), single, strict=True):
            one.forced = one.position, one.guide.forced() if alone else ()

    def _live(self, some: dict[int, _Guided]) -> dict[int, _Guided]:
        """Those of `some` that are still guided."""
        return {slot: one for slot, one in some.items() if self._guided.get(slot) is one}

    def _watch(self) -> tuple[list[tuple[int, _Guided]], np.ndarray]:
        """The slots that wait for tokens, and where the log gets these; kept until they change."""
        with self._lock:
            self._watched = list(self._guided.items()), self._indices(self._guided)
            return self._watched

    def _indices(self, some: dict[int, _Guided]) -> np.ndarray:
        """Where the log gets the tokens of their positions."""
        indices = (
            slot * self._depth + (one.position - 1) % self._depth for slot, one in some.items()
        )
        return np.fromiter(indices, dtype=np.int64, count=len(some))
