"""Staging: the copy engine brings remote rows of matrices into a ring of HBM ahead of their use.

Knows the order in which a pass uses matrices, not their ops. The ring holds the matrices used
next, those of the next layer and of the next decode step included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dakrun.hardware import LOCAL
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.runtime import CopyStream
from dakrun.memory.tiers import aligned


@dataclass(frozen=True)
class Place:
    """The place of a matrix's remote rows in the ring: bytes `start` to `end`.

    The copy may start once the kernels of matrix number `after` of the step have run, or, with
    None, as soon as the step begins. `early` copies, those of the first matrices, are made by the
    step before, so that no step begins with a wait.
    """

    start: int
    end: int
    after: int | None
    early: bool


def places(sizes: Sequence[int], ring: int) -> list[Place]:
    """Places in a ring of `ring` bytes for matrices of `sizes` bytes, used in order every step.

    Each follows the previous one, or starts at the ring's beginning if there is no room left. The
    first ones, which fit in together, are early. Raises ValueError for a size above the ring's.
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


class Staging:
    """Copies the remote rows of matrices into a ring of HBM ahead of their use.

    `staged` names those matrices in the order of their use; the others are read where they lie.
    `begin` and `end` enclose the launches of a pass, which may be captured in a CUDA graph. With
    `ahead` every pass leaves the first matrices of the next one in the ring; `fill` does so for the
    first pass, and after others have used the ring. One stream for each remote tier copies, so that
    links work side by side.
    """

    def __init__(
        self,
        matrices: Mapping[str, PackedTensor],
        staged: Sequence[str],
        ring: torch.Tensor,
        *,
        ahead: bool = True,
    ) -> None:
        """`ring` is uint8, 1-D, in HBM. Raises ValueError where a matrix does not fit into it."""
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
        # Numbers of a pass's copies in their order; the early ones are for the next pass.
        self._order = [*range(len(self._early), len(found)), *self._early]
        self._next, self._copied = 0, dict[int, list[torch.cuda.Event | None]]()

    def fill(self) -> None:
        """Copy the first matrices of the next pass, as the previous pass usually does."""
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
        """Let the next launches wait for the copies."""
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
        """Free a matrix's place in the ring for the next copy, once its readers are launched."""
        if name in self._number:
            self._advance(self._number[name])

    def has(self, name: str) -> bool:
        """Whether the matrix is staged: a kernel that reads it starts when its copy has ended."""
        return name in self._number

    def _advance(self, done: int | None) -> None:
        """Start the copies that waited for matrix number `done` of the pass."""
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
        """Let the next copies wait for all launches so far."""
        for stream in self._streams:
            stream.follow()

    def _copy(self, number: int) -> None:
        to, of = self._staged[number].parts[1:], self._sources[number].parts[1:]
        for stream, here, there in zip(self._streams, to, of, strict=True):
            if there.data.nbytes:
                stream.copy((here.data, there.data))


def staged_bytes(matrix: PackedTensor) -> int:
    """Bytes that the remote rows of a matrix take in a ring."""
    return sum(aligned(part.data.nbytes) for part in matrix.parts[1:])


def _moved(matrix: PackedTensor, room: torch.Tensor) -> PackedTensor:
    """`matrix` with its remote parts in `room`, one after the other."""
    parts, at = [matrix.parts[0]], 0
    for part in matrix.parts[1:]:
        parts.append(replace(part, tier=LOCAL, data=room[at : at + part.data.nbytes]))
        at += aligned(part.data.nbytes)
    return replace(matrix, parts=tuple(parts))
