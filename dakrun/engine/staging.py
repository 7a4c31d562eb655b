"""Staging: the copy engine brings remote bytes into a ring of HBM ahead of their use.

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
    """The place of an item in the ring: bytes `start` to `end`.

    The copy may start once the kernels that use item number `after` of the step have run, or, with
    None, as soon as the step begins. `early` copies, those of the first items, are made by the
    step before, so that no step begins with a wait.
    """

    start: int
    end: int
    after: int | None
    early: bool


def places(sizes: Sequence[int], ring: int) -> list[Place]:
    """Places in a ring of `ring` bytes for items of `sizes` bytes, used in order every step.

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


class StagingRing:
    """Copies bytes of remote tiers into a ring of HBM ahead of their use, the same in every pass.

    A pass uses item after item; item i is `sources[i]`, uint8 1-D of each remote tier, and is
    `staged[i]` in the ring. `begin` and `end` enclose the launches of a pass, which may be captured
    in a CUDA graph. Every pass leaves the first items of the next one in the ring; `fill` does so
    for the first pass, and after others have used the ring. One stream for each remote tier copies,
    so that links work side by side.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[torch.Tensor]],
        ring: torch.Tensor,
        *,
        ahead: int | None = None,
    ) -> None:
        """`ring` is uint8, 1-D, in HBM. Raises ValueError where an item does not fit into it.

        `ahead` items, or with None as many as the ring holds, are left for the next pass.
        """
        found = places([_item_bytes(item) for item in sources], ring.numel())
        if ahead is not None:
            found = [
                replace(place, after=None, early=False) if place.early and i >= ahead else place
                for i, place in enumerate(found)
            ]
        self._places, self._sources = found, sources
        self.staged = [
            _views(item, ring[place.start : place.end])
            for item, place in zip(sources, found, strict=True)
        ]
        self._streams = [CopyStream(ring.device) for _ in sources[0]]
        self._early = [i for i, place in enumerate(found) if place.early]
        # Numbers of a pass's copies in their order; the early ones are for the next pass.
        self._order = [*range(len(self._early), len(found)), *self._early]
        self._next, self._copied = 0, dict[int, list[torch.cuda.Event | None]]()

    def fill(self) -> None:
        """Copy the first items of the next pass, as the previous pass usually does."""
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

    def wait(self, number: int) -> None:
        """Let the next launches wait for the copy of item `number` of the pass."""
        for copied in self._copied.get(number, ()):  # else the pass before has copied it
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)

    def free(self, number: int) -> None:
        """Free the place of item `number` for the next copy, once its readers are launched."""
        self._advance(number)

    def _advance(self, done: int | None) -> None:
        """Start the copies that waited for item number `done` of the pass."""
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
        items = zip(self._streams, self.staged[number], self._sources[number], strict=True)
        for stream, here, there in items:
            if there.nbytes:
                stream.copy((here, there))


class Staging(StagingRing):
    """Copies the remote rows of matrices into a ring of HBM ahead of their use.

    `staged` names those matrices in the order of their use; the others are read where they lie.
    With `ahead` every pass leaves the first matrices of the next one in the ring.
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
        remote = [[part.data for part in matrices[name].parts[1:]] for name in staged]
        super().__init__(remote, ring, ahead=None if ahead else 0)
        self._number = {name: number for number, name in enumerate(staged)}
        self._matrices = dict(matrices)
        for name, here in zip(staged, self.staged, strict=True):
            self._matrices[name] = _moved(matrices[name], here)

    def fetch(self, name: str) -> PackedTensor:
        """The matrix, its remote rows in the ring where it is staged."""
        if name in self._number:
            self.wait(self._number[name])
        return self._matrices[name]

    def release(self, name: str) -> None:
        """Free a matrix's place in the ring for the next copy, once its readers are launched."""
        if name in self._number:
            self.free(self._number[name])

    def has(self, name: str) -> bool:
        """Whether the matrix is staged: a kernel that reads it starts when its copy has ended."""
        return name in self._number


def staged_bytes(matrix: PackedTensor) -> int:
    """Bytes that the remote rows of a matrix take in a ring."""
    return _item_bytes([part.data for part in matrix.parts[1:]])


def _item_bytes(item: Sequence[torch.Tensor]) -> int:
    return sum(aligned(data.nbytes) for data in item)


def _views(item: Sequence[torch.Tensor], room: torch.Tensor) -> list[torch.Tensor]:
    """Views of `room`, one after the other, each as long as a tensor of `item`."""
    views, at = [], 0
    for data in item:
        views.append(room[at : at + data.nbytes])
        at += aligned(data.nbytes)
    return views


def _moved(matrix: PackedTensor, here: Sequence[torch.Tensor]) -> PackedTensor:
    """`matrix` with the bytes of its remote parts in `here`."""
    remote = zip(matrix.parts[1:], here, strict=True)
    moved = (replace(part, tier=LOCAL, data=data) for part, data in remote)
    return replace(matrix, parts=(matrix.parts[0], *moved))
