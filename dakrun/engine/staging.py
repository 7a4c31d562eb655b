"""Matrices whose remote rows the copy engine brings into HBM ahead of their use.

Knows in which order a pass uses them, not what for: a ring of HBM holds those that come next, over
the end of a layer as, where passes follow each other, over that of a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dakrun.hardware.profile import LOCAL
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.runtime.copy_engine import CopyStream
from dakrun.memory.tiers import aligned


@dataclass(frozen=True)
class Place:
    """Where in the ring the remote rows of a matrix come to lie: bytes `start` to `end`.

    They may be copied there once the matrices up to number `after` of the step are done with, or,
    if it is None, as soon as the step begins. `early` is for those that the step before copies.
    """

    start: int
    end: int
    after: int | None
    early: bool


def places(sizes: Sequence[int], ring: int) -> list[Place]:
    """Places in a ring of `ring` bytes for what a step uses in this order, step after step.

    Each follows the one before, from the ring's start again where it has no room. The first ones,
    which fit in at once, are for the step before to copy.
    """
    spans, at, lap, laps = [], 0, 0, []
    for size in sizes:
        if size > ring:
            raise ValueError(f"expected at most {ring} bytes, got {size}")
        if at + size > ring:
            at, lap = 0, lap + 1
        spans.append((at, at + size))
        laps.append(lap)
        at += size
    found = []
    for number, (start, end) in enumerate(spans):
        early = laps[number] == 0
        before = range(len(spans)) if early else range(number)
        shared = [i for i in before if spans[i][0] < end and start < spans[i][1]]
        found.append(Place(start, end, max(shared, default=None), early))
    return found


class StagedOperands:
    """Operands of a pass: `staged` ones, in the order of their use, go through `ring`, of uint8.

    The others are read where they lie. `begin` and `end` go around what is launched for a pass,
    which may be captured in a CUDA graph. With `ahead` every pass leaves the first matrices of the
    next one in the ring, which `fill` does for the first one, and after others have used the ring.
    One stream launches, and one for each remote tier copies, so that links work side by side.
    """

    def __init__(
        self,
        matrices: Mapping[str, PackedTensor],
        staged: Sequence[str],
        ring: torch.Tensor,
        *,
        ahead: bool = True,
    ) -> None:
        """Raises ValueError where one of them does not fit into the ring."""
        self._matrices = matrices
        sizes = [staged_bytes(matrices[name]) for name in staged]
        found = places(sizes, ring.numel())
        if not ahead:
            found = [replace(p, after=None, early=False) if p.early else p for p in found]
        self._number = {name: number for number, name in enumerate(staged)}
        self._places = found
        self._staged = [
            _moved(matrices[name], ring[place.start : place.end])
            for name, place in zip(staged, found, strict=True)
        ]
        self._sources = [matrices[name] for name in staged]
        self._streams = [CopyStream(ring.device) for _ in self._sources[0].parts[1:]]
        self._early = [i for i, place in enumerate(found) if place.early]
        self._order = [*range(len(self._early), len(found)), *self._early]  # of a pass's copies
        self._next, self._copied = 0, dict[int, list[torch.cuda.Event | None]]()

    def fill(self) -> None:
        """Bring what the pass before would have left in the ring."""
        self._follow()
        for number in self._early:
            self._copy(number)
        self.end()

    def begin(self) -> None:
        """Start a pass's copies."""
        self._follow()
        self._next, self._copied = 0, {}
        self._advance(None)

    def end(self) -> None:
        """Let what is launched next wait for the copies."""
        for stream in self._streams:
            stream.join()

    def fetch(self, name: str) -> PackedTensor:
        """The matrix, its remote rows in the ring where it is staged."""
        number = self._number.get(name)
        if number is None:
            return self._matrices[name]
        for copied in self._copied.get(number, ()):  # else the pass before has copied it
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)
        return self._staged[number]

    def release(self, name: str) -> None:
        """Give its place in the ring to whatever comes next there."""
        if name in self._number:
            self._advance(self._number[name])

    def overlaps(self, name: str) -> bool:
        """Not where it is copied first: a copy has to have ended before a kernel starts."""
        return name not in self._number

    def _advance(self, done: int | None) -> None:
        """Start the copies that only waited for matrix `done` of the pass."""
        waited = False
        while self._next < len(self._order):
            number = self._order[self._next]
            place = self._places[number]
            after = place.after
            if after is not None and (done is None or after > done):
                return
            if not waited:
                self._follow()
                waited = True
            self._copy(number)
            if not place.early:
                self._copied[number] = [stream.copied() for stream in self._streams]
            self._next += 1

    def _follow(self) -> None:
        """Let copies that are started next wait for what is launched."""
        for stream in self._streams:
            stream.follow()

    def _copy(self, number: int) -> None:
        to, of = self._staged[number].parts[1:], self._sources[number].parts[1:]
        for stream, here, there in zip(self._streams, to, of, strict=True):
            if there.data.nbytes:
                stream.copy((here.data, there.data))


def staged_bytes(matrix: PackedTensor) -> int:
    """Bytes of a ring that the matrix's remote rows take."""
    return sum(aligned(part.data.nbytes) for part in matrix.parts[1:])


def _moved(matrix: PackedTensor, room: torch.Tensor) -> PackedTensor:
    """`matrix` with its remote parts, one after the other, in `room`."""
    parts, at = [matrix.parts[0]], 0
    for part in matrix.parts[1:]:
        parts.append(replace(part, tier=LOCAL, data=room[at : at + part.data.nbytes]))
        at += aligned(part.data.nbytes)
    return replace(matrix, parts=tuple(parts))
