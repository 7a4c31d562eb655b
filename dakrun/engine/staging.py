"""Staging: the copy engine brings remote bytes into a ring of HBM ahead of their use.

Knows the order in which a pass uses matrices, not their ops. The ring holds the matrices used
next, those of the next layer and of the next decode step included.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dakrun.hardware import LOCAL
from dakrun.kernels.runtime import CopyStream
from dakrun.memory.matrix import TieredMatrix
from dakrun.memory.tiers import aligned


@dataclass(frozen=True)
class RingSpan:
    """The bytes `start` to `end` of the ring, which an item takes.

    The item's copy may start once the kernels that use item number `after` of the pass have run;
    with None, as soon as the pass begins. The previous pass copies the first items (`early`), so
    that no pass begins with a wait.
    """

    start: int
    end: int
    after: int | None
    early: bool


def ring_spans(sizes: Sequence[int], ring: int, *, early: bool = True) -> list[RingSpan]:
    """Spans of a ring of `ring` bytes for items of `sizes` bytes, used in order every pass.

    With `early`, the previous pass copies item 0 and its successors, up to the first that overlaps
    the last item's space: that copy could start only after the pass's last kernel, and the pass
    would end with a wait for it. Raises ValueError for a size above the ring's.
    """
    spans = _spans(sizes, ring)

    def last_in(span: tuple[int, int], items: range) -> int | None:
        shared = [i for i in items if spans[i][0] < span[1] and span[0] < spans[i][1]]
        return max(shared, default=None)

    found, last = list[RingSpan](), len(spans) - 1
    for number, span in enumerate(spans):
        after = last_in(span, range(number))
        if early := early and after is None:
            before = last_in(span, range(len(spans)))
            early = number == 0 or before != last
            after = before if early else None
        found.append(RingSpan(*span, after, early))
    return found


def _spans(sizes: Sequence[int], ring: int) -> list[tuple[int, int]]:
    """First byte and end of each item: behind the previous item, or from 0 if no room is left.

    The last items go round the ring once more, if that moves the last item off the space of item
    0: item 0 of the next pass is then copied while kernels read the last item.
    """
    spans, at = list[tuple[int, int]](), 0
    for size in sizes:
        if size > ring:
            raise ValueError(f"expected at most {ring} bytes, got {size}")
        if at + size > ring:
            at = 0
        spans.append((at, at + size))
        at += size
    before, number = 0, len(sizes) - 1
    while number > 1 and spans[-1][0] < sizes[0] > before:
        number -= 1
        before += sizes[number]
    if 0 < before <= ring - sizes[-1] and before >= sizes[0]:
        ends = [*itertools.accumulate(sizes[number:])]
        spans[number:] = zip([0, *ends], ends, strict=False)
    return spans


class StagingRing:
    """Copies bytes of remote tiers into a ring of HBM ahead of their use, the same in every pass.

    A pass uses item after item; item i is `sources[i]`, uint8 1-D tensors, and is `staged[i]` in
    the ring. `begin` and `end` enclose the launches of a pass, which may be captured in a CUDA
    graph. With `early` every pass leaves the first items of the next pass in the ring; `fill` does
    so for the first pass, and after others have used the ring. Each of `links` streams copies every
    `links`-th tensor of an item, so that links work side by side. Copies start as there is room
    for them; while they are `held`, only when `start` is called or an item is waited for.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[torch.Tensor]],
        ring: torch.Tensor,
        *,
        links: int = 1,
        early: bool = True,
    ) -> None:
        """`ring` is uint8, 1-D, in HBM. Raises ValueError where an item does not fit into it."""
        self.held = False
        self._spans = ring_spans([_item_bytes(item) for item in sources], ring.numel(), early=early)
        self._sources = sources
        self.staged = [
            _views(item, ring[span.start : span.end])
            for item, span in zip(sources, self._spans, strict=True)
        ]
        self._streams = [CopyStream(ring.device) for _ in range(links)]
        self._early = [i for i, span in enumerate(self._spans) if span.early]
        # Numbers of a pass's copies in their order; the early ones are for the next pass.
        self._order = [*range(len(self._early), len(sources)), *self._early]
        self._next, self._copied = 0, dict[int, list[torch.cuda.Event | None]]()
        self._freed: int | None = None  # the last item whose readers are launched

    def fill(self) -> None:
        """Copy the first items of the next pass, as the previous pass usually does."""
        self._follow()
        for number in self._early:
            self._copy(number)
        self._join()

    def begin(self) -> None:
        """Start a pass's copies."""
        self._follow()
        self._next, self._copied, self._freed = 0, {}, None
        if not self.held:
            self.start()

    def end(self) -> None:
        """Let the next launches wait for the copies."""
        self._join()

    def wait(self, number: int) -> None:
        """Let the next launches wait for the copy of item `number` of the pass."""
        if not (number in self._copied or self._spans[number].early):
            self.start()
            assert number in self._copied, "items are used in order"
        for copied in self._copied.get(number, ()):  # else the pass before has copied it
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)

    def free(self, number: int) -> None:
        """Free the span of item `number` for the next copy, once its readers are launched."""
        self._freed = number
        if not self.held:
            self.start()

    def start(self) -> None:
        """Start the copies for which there is room, behind all launches so far."""
        done, waited = self._freed, False
        while self._next < len(self._order):
            number = self._order[self._next]
            span = self._spans[number]
            if span.after is not None and (done is None or span.after > done):
                return
            if not waited:
                self._follow()
                waited = True
            self._copy(number)
            if not span.early:
                self._copied[number] = [stream.copied() for stream in self._streams]
            self._next += 1

    def _join(self) -> None:
        """Let the next launches wait for all copies."""
        for stream in self._streams:
            stream.join()

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
    for few copies. With `early` every pass leaves the first items of the next pass in the ring.
    `behind` may name matrices in their order, each the first one used behind an attention that
    reads the link, too. Then copies start whenever one of these is used next, so that attention
    mostly has the link for itself, and behind the last of them as there is room.
    """

    def __init__(
        self,
        matrices: Mapping[str, TieredMatrix],
        staged: Sequence[str],
        ring: torch.Tensor,
        *,
        together: int,
        early: bool = True,
        behind: Sequence[str] = (),
    ) -> None:
        """`ring` is uint8, 1-D, in HBM; a group has up to `together` bytes or a single matrix.

        Raises ValueError where one does not fit into the ring.
        """
        sizes = [staged_bytes(matrices[name]) for name in staged]
        first = {i for i, name in enumerate(staged) if name in set(behind)}
        groups = grouped(sizes, together, first)
        remote = {name: _remote(matrices[name]) for name in staged}
        sources = [[data for i in group for data in remote[staged[i]]] for group in groups]
        links = len(remote[staged[0]])
        super().__init__(sources, ring, links=links, early=early)
        self._matrices = dict(matrices)
        self._behind, self._last_behind = frozenset(behind), behind[-1] if behind else None
        self._first, self._last = dict[str, int](), dict[str, int]()  # of the matrices of a group
        for number, group in enumerate(groups):
            views = iter(self.staged[number])
            for name in (staged[i] for i in group):
                here = list(itertools.islice(views, len(remote[name])))
                self._matrices[name] = _moved(matrices[name], here)
            self._first[staged[group[0]]] = number
            self._last[staged[group[-1]]] = number

    def begin(self) -> None:
        """Start a pass's copies."""
        self.held = bool(self._behind)
        super().begin()

    def matrix(self, name: str) -> TieredMatrix:
        """The matrix, its remote rows in the ring where it is staged."""
        return self._matrices[name]

    def fetch(self, name: str) -> TieredMatrix:
        """The matrix, as `matrix` gives it; the next launches wait for its copy."""
        if name in self._behind:
            self.start()
            self.held = name != self._last_behind
        if name in self._first:
            self.wait(self._first[name])
        return self.matrix(name)

    def release(self, name: str) -> None:
        """Free a matrix's span of the ring for the next copy, once its readers are launched."""
        if name in self._last:
            self.free(self._last[name])

    def waits(self, name: str) -> bool:
        """Whether a kernel that reads the matrix starts when a copy has ended."""
        return name in self._first


@dataclass(frozen=True)
class PassStaging:
    """What a pass stages, by its tokens: up to `few_tokens` of them `few`, else `most`.

    Passes of few tokens choose some of the experts, and read these where they lie; larger ones read
    nearly all. So `few` has no experts; it is `most` if that has none either. None: nothing.
    """

    most: Staging | None = None
    few: Staging | None = None
    few_tokens: int = 0

    def of(self, tokens: int) -> Staging | None:
        """What a pass of `tokens` tokens stages."""
        return self.few if tokens <= self.few_tokens else self.most

    def has_experts(self, tokens: int) -> bool:
        """Whether a pass of `tokens` tokens stages experts; each has to lie at its index then."""
        return self.of(tokens) is not self.few


def grouped(sizes: Sequence[int], together: int, first: Collection[int] = ()) -> list[list[int]]:
    """Indexes of `sizes` in groups of neighbours, of up to `together` bytes or a single size.

    Those in `first` begin a group.
    """
    groups, held = list[list[int]](), 0
    for number, size in enumerate(sizes):
        if groups and held + size <= together and number not in first:
            groups[-1].append(number)
            held += size
        else:
            groups.append([number])
            held = size
    return groups


def staged_bytes(matrix: TieredMatrix) -> int:
    """Bytes that the remote rows of a matrix take in a ring."""
    return _item_bytes(_remote(matrix))


def _remote(matrix: TieredMatrix) -> list[torch.Tensor]:
    """The arrays of the remote parts of a matrix."""
    return [array for part in matrix.parts[1:] for array in part.arrays]


def _item_bytes(item: Sequence[torch.Tensor]) -> int:
    return sum(aligned(data.nbytes) for data in item)


def _views(item: Sequence[torch.Tensor], room: torch.Tensor) -> list[torch.Tensor]:
    """Views of `room`, one after the other, each as long as a tensor of `item`."""
    views, at = [], 0
    for data in item:
        views.append(room[at : at + data.nbytes])
        at += aligned(data.nbytes)
    return views


def _moved(matrix: TieredMatrix, here: Sequence[torch.Tensor]) -> TieredMatrix:
    """`matrix` with the arrays of its remote parts in `here`."""
    arrays = iter(here)
    moved = (
        replace(part, tier=LOCAL, arrays=tuple(itertools.islice(arrays, len(part.arrays))))
        for part in matrix.parts[1:]
    )
    return replace(matrix, parts=(matrix.parts[0], *moved))
