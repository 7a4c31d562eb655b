"""Matrices whose remote rows the copy engine brings into HBM ahead of their use.

Knows in which order a step uses them, not what for: a ring of HBM holds those that come next, over
the end of a layer as over that of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dakrun.kernels.copy_engine import copy
from dakrun.kernels.packing import PackedTensor
from dakrun.memory import aligned


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
    """Operands of a decode step: `staged` ones, in the order of their use, go through a ring.

    The others are read where they lie. `begin` and `end` go around what is launched for a step,
    which may be captured in a CUDA graph; every step leaves the first matrices of the next one in
    the ring. One stream launches, and one for each remote tier copies, so that links work side by
    side.
    """

    def __init__(
        self, matrices: Mapping[str, PackedTensor], staged: Sequence[str], *, buffers: int
    ) -> None:
        """Take a ring of `buffers` times the largest, and fill it for the first step."""
        self._matrices = matrices
        sizes = [sum(aligned(part.data.nbytes) for part in matrices[n].parts[1:]) for n in staged]
        ring = buffers * max(sizes)
        found = places(sizes, ring)
        self._number = {name: number for number, name in enumerate(staged)}
        self._places = found
        device = next(iter(matrices.values())).parts[0].data.device
        self._ring = torch.empty(ring, dtype=torch.uint8, device=device)
        self._staged = [
            _moved(matrices[name], self._ring[place.start : place.end])
            for name, place in zip(staged, found, strict=True)
        ]
        self._sources = [matrices[name] for name in staged]
        self._streams = [torch.cuda.Stream(device) for _ in self._sources[0].parts[1:]]
        early = [i for i, place in enumerate(found) if place.early]
        self._order = [*range(len(early), len(found)), *early]  # of a step's copies
        for number in early:
            self._copy(number)
        for stream in self._streams:
            stream.synchronize()
        self._next, self._copied = 0, dict[int, list[torch.cuda.Event]]()

    def begin(self) -> None:
        """Start a step's copies."""
        self._wait()
        self._next, self._copied = 0, {}
        self._advance(None)

    def end(self) -> None:
        """Let what is launched next wait for the copies."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def fetch(self, name: str) -> PackedTensor:
        """The matrix, its remote rows in the ring where it is staged."""
        number = self._number.get(name)
        if number is None:
            return self._matrices[name]
        for copied in self._copied.get(number, ()):  # else the step before has copied it
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
        """Start the copies that only waited for matrix `done` of the step."""
        waited = False
        while self._next < len(self._order):
            number = self._order[self._next]
            place = self._places[number]
            after = place.after
            if after is not None and (done is None or after > done):
                return
            if not waited:
                self._wait()
                waited = True
            self._copy(number)
            if not place.early:
                self._copied[number] = [stream.record_event() for stream in self._streams]
            self._next += 1

    def _wait(self) -> None:
        """Let copies that are started next wait for what is launched."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())

    def _copy(self, number: int) -> None:
        to, of = self._staged[number].parts[1:], self._sources[number].parts[1:]
        for stream, here, there in zip(self._streams, to, of, strict=True):
            if there.data.nbytes:
                with torch.cuda.stream(stream):
                    copy(here.data, there.data)


def _moved(matrix: PackedTensor, room: torch.Tensor) -> PackedTensor:
    """`matrix` with its remote parts, one after the other, in `room`."""
    parts, at = [matrix.parts[0]], 0
    for part in matrix.parts[1:]:
        parts.append(replace(part, data=room[at : at + part.data.nbytes]))
        at += aligned(part.data.nbytes)
    return replace(matrix, parts=tuple(parts))
