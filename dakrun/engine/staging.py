"""Staging: the copy engine brings remote bytes into a ring of HBM ahead of their use.

Knows the order in which a pass uses matrices, not their ops. The ring has two halves: one is read
while the other is filled, with what the next layers or the next decode step will use.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dakrun.hardware import LOCAL
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.runtime import CopyStream
from dakrun.memory.tiers import aligned
from dakrun.units import ceil_div


class StagingRing:
    """Copies bytes of remote tiers into a ring of HBM ahead of their use, the same in every pass.

    A pass uses item after item; item i is `sources[i]`, uint8 1-D tensors, and is `staged[i]` in
    half i % 2 of the ring. `begin` and `end` enclose the launches of a pass, which may be captured
    in a CUDA graph. An `early` ring has the first item at the start of every pass: the pass before
    copies it, before the first pass and after others have used the ring `fill` does. Each of
    `links` streams copies every `links`-th tensor of an item, so that links work side by side.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[torch.Tensor]],
        ring: torch.Tensor,
        *,
        links: int = 1,
        early: bool = True,
    ) -> None:
        """`ring` is uint8, 1-D, in HBM. Raises ValueError where an item does not fit into a half.

        A single item has all of the ring.
        """
        half = ring.numel() // min(2, len(sources))
        largest = max(map(_item_bytes, sources))
        if largest > half:
            raise ValueError(f"expected at most {half} bytes, got {largest}")
        self._sources = sources
        self.staged = [
            _views(item, ring[half * (number % 2) :]) for number, item in enumerate(sources)
        ]
        self._streams = [CopyStream(ring.device) for _ in range(links)]
        self._early = early
        # Numbers of a pass's copies in their order; an early one is for the next pass.
        numbers = range(len(sources))
        self._order = [*numbers[1:], 0] if early else [*numbers]
        self._next, self._copied = 0, dict[int, list[torch.cuda.Event | None]]()

    def fill(self) -> None:
        """Copy the first item of the next pass, if it is early, as the previous pass usually does.

        The next launches wait for it.
        """
        if self._early:
            self._follow()
            self._copy(0)
            self.end()

    def begin(self) -> None:
        """Start a pass's copies."""
        self._follow()
        self._next, self._copied = 0, {}
        self._advance(-1)

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

    def _advance(self, done: int) -> None:
        """Start the copies that waited for item number `done` of the pass."""
        waited = False
        while self._next < len(self._order) and self._before(self._order[self._next]) <= done:
            if not waited:
                self._follow()
                waited = True
            number = self._order[self._next]
            self._copy(number)
            if number or not self._early:
                self._copied[number] = [stream.copied() for stream in self._streams]
            self._next += 1

    def _before(self, number: int) -> int:
        """Number of the item that has item `number`'s half before it; -1 as a pass begins."""
        if number == 0 and self._early:  # for the next pass
            return (len(self._sources) - 1) // 2 * 2
        return max(-1, number - 2)

    def _follow(self) -> None:
        """Let the next copies wait for all launches so far."""
        for stream in self._streams:
            stream.follow()

    def _copy(self, number: int) -> None:
        pairs = zip(self.staged[number], self._sources[number], strict=True)
        for stream, (here, there) in zip(itertools.cycle(self._streams), pairs):
            if there.nbytes:
                stream.copy((here, there))


class Staging(StagingRing):
    """Copies the remote rows of matrices into a ring of HBM ahead of their use.

    `staged` names those matrices in the order of their use; the others are read where they lie.
    Small ones that follow each other are one item of the ring (`grouped`), so that kernels wait
    for few copies. With `early` every pass leaves the first item of the next one in the ring.
    """

    def __init__(
        self,
        matrices: Mapping[str, PackedTensor],
        staged: Sequence[str],
        ring: torch.Tensor,
        *,
        together: int,
        early: bool = True,
    ) -> None:
        """`ring` is uint8, 1-D, in HBM; small matrices are copied in groups of up to `together` bytes.

        Raises ValueError where a group does not fit into half of the ring.
        """
        groups = grouped([staged_bytes(matrices[name]) for name in staged], together)
        remote = {name: [part.data for part in matrices[name].parts[1:]] for name in staged}
        sources = [[data for i in group for data in remote[staged[i]]] for group in groups]
        super().__init__(sources, ring, links=len(remote[staged[0]]), early=early)
        self._matrices = dict(matrices)
        self._first, self._last = dict[str, int](), dict[str, int]()  # of the matrices of a group
        for number, group in enumerate(groups):
            views = iter(self.staged[number])
            for name in (staged[i] for i in group):
                here = list(itertools.islice(views, len(remote[name])))
                self._matrices[name] = _moved(matrices[name], here)
            self._first[staged[group[0]]] = number
            self._last[staged[group[-1]]] = number

    def matrix(self, name: str) -> PackedTensor:
        """The matrix, its remote rows in the ring where it is staged."""
        return self._matrices[name]

    def fetch(self, name: str) -> PackedTensor:
        """The same; the next launches wait for its copy."""
        if name in self._first:
            self.wait(self._first[name])
        return self.matrix(name)

    def release(self, name: str) -> None:
        """Free a matrix's place in the ring for the next copy, once its readers are launched."""
        if name in self._last:
            self.free(self._last[name])

    def waits(self, name: str) -> bool:
        """Whether a kernel that reads the matrix starts when a copy has ended."""
        return name in self._first


def grouped(sizes: Sequence[int], together: int) -> list[list[int]]:
    """Indexes of `sizes` in groups of neighbours, of up to `together` bytes or a single size.

    A group of several has at most half of all bytes. The number of groups is even if any has several: the halves of a ring then take turns from one
    pass to the next, too.
    """
    together = min(together, ceil_div(sum(sizes), 2))
    groups, held = list[list[int]](), 0
    for number, size in enumerate(sizes):
        if groups and held + size <= together:
            groups[-1].append(number)
            held += size
        else:
            groups.append([number])
            held = size
    at = max(range(len(groups)), key=lambda i: len(groups[i]), default=0)
    if len(groups) % 2 and (middle := len(groups[at]) // 2):
        groups[at : at + 1] = groups[at][:middle], groups[at][middle:]
    return groups


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
