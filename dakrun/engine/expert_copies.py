"""Exchanges of experts that kernels read, by copies that run beside steps.

Knows bytes, stack indices and streams; expert_moves.py says which experts to exchange.

The matrices of a layer's experts are stacked. An expert's index in the stack decides which tier's
CTAs read it; its shift is the bytes from that index's memory to the memory that the expert is in.
One piece of HBM is spare. A hot expert comes from the host, a cold one goes there:

    beside steps:   hot expert, host -> spare    both are read where they were
    between steps:  indices and shifts change    hot is read from the spare piece, by HBM's CTAs
    beside steps:   cold expert, HBM -> host     still read from HBM, by the host's CTAs
    between steps:  its shift changes            its piece of HBM is the spare one now

The device's tables of indices and shifts change in the order of the stream: before the first kernel
of a step, which no other kernel of the step overtakes. So a piece that no table names is free, and
captured graphs stay as they are.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

from dakrun.engine.expert_moves import matrices_at
from dakrun.engine.expert_use import ExpertUse
from dakrun.kernels.runtime import CopyStream
from dakrun.memory.device import upload
from dakrun.memory.matrix import TieredMatrix

COPY_SHARE = 0.01  # of what the link carries in a step, at most, for copies of experts
LEAST_COPY = 64 << 10  # bytes that may be copied beside a step, however short the step is


class ExpertTables:
    """The stack indices of each layer's experts, and each index's shifts in its two matrices.

    Kernels read them on `device`; `set_stack_indices` and `set_shift` take effect with `publish`.
    """

    def __init__(self, use: ExpertUse, device: torch.device) -> None:
        layers, experts = len(use.orders), len(use.orders[0])
        self._host = torch.zeros(layers, 3, experts, dtype=torch.int64)
        for layer, order in enumerate(use.orders):
            self.set_stack_indices(layer, order)
        self._device = self._host.to(device, copy=True)

    def stack_indices(self, layer: int) -> torch.Tensor:
        """int32 [E] on the device: the stack index of each expert, by its number."""
        experts = self._device.shape[2]
        return self._device[layer, 2].view(torch.int32)[:experts]

    def shifts(self, layer: int, matrix: int) -> torch.Tensor:
        """int64 [E] on the device: bytes from each stack index to where its expert lies."""
        return self._device[layer, matrix]

    def set_stack_indices(self, layer: int, order: Sequence[int]) -> None:
        """Let the experts of a layer be stacked in `order`."""
        indices = sorted(range(len(order)), key=order.__getitem__)
        self._host[layer, 2].view(torch.int32)[: len(indices)] = torch.tensor(indices)

    def set_shift(self, layer: int, matrix: int, index: int, shift: int) -> None:
        """Let the expert at a stack index lie `shift` bytes behind it."""
        self._host[layer, matrix, index] = shift

    def publish(self, layer: int) -> None:
        """Let kernels that are launched from now on read the layer's tables as they are now."""
        self._device[layer].copy_(upload(self._host[layer].clone(), self._device.device))


class ExpertCopies:
    """Exchanges pairs of experts, of `matrices` whose shifts are in `tables`.

    `spare`, uint8 in HBM, has room for `together` experts: so many pairs may be under way. Beside a
    step are copied as many bytes as the link carries, at `rate` bytes/s, in COPY_SHARE of the time
    of the step before; at least LEAST_COPY.
    """

    def __init__(
        self,
        use: ExpertUse,
        matrices: Mapping[str, TieredMatrix],
        tables: ExpertTables,
        spare: torch.Tensor,
        together: int,
        rate: float,
    ) -> None:
        self._use, self._matrices, self._tables = use, matrices, tables
        self._stream, self._rate = CopyStream(spare.device), rate
        self._started = False  # whether there are copies for which no step waits yet
        self._room = LEAST_COPY  # bytes that may be copied beside the next step
        self.together, self._rooms = together, list(spare.view(together, -1))
        self._spare: list[list[torch.Tensor]] = []  # pieces of the two matrices of an expert
        self._pieces: dict[tuple[int, int], list[torch.Tensor]] = {}  # by layer and local index

    def allow(self, seconds: float | None) -> None:
        """Allow copies beside the next step, if it takes `seconds`; None: as many as there are."""
        bounded = None if seconds is None else round(COPY_SHARE * seconds * self._rate)
        self._room = sys.maxsize if bounded is None else max(LEAST_COPY, bounded)

    def finish(self) -> None:
        """Wait for the copies that have been started."""
        if (copied := self._stream.copied()) is not None:
            copied.synchronize()

    def exchange(self, layer: int, first: int, second: int) -> Iterator[bool]:
        """An Exchange (expert_moves.py): `first` is a remote index of a layer, `second` a local."""
        remote, local = (self._homes(layer, index) for index in (first, second))
        cold = self._pieces.pop((layer, second), local)
        hot = self._take([piece.nbytes for piece in cold])
        yield from self._copied(hot, remote, away=False)
        self._use.exchange(layer, first, second)
        self._tables.set_stack_indices(layer, self._use.orders[layer])
        self._lie(layer, second, local, hot)
        self._lie(layer, first, remote, cold)
        self._tables.publish(layer)
        yield from self._copied(remote, cold, away=True)
        self._lie(layer, first, remote, remote)
        self._tables.publish(layer)
        self._pieces[layer, second] = hot
        self._spare.append(cold)

    def _take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Spare pieces of so many bytes."""
        return self._spare.pop() if self._spare else list(self._rooms.pop().split(sizes))

    def _homes(self, layer: int, index: int) -> list[torch.Tensor]:
        """The bytes of the two matrices stacked at an index; each is one array."""
        found = matrices_at(self._use.mixtures[layer], self._matrices, index)
        return [data for matrix in found for data in matrix.arrays]

    def _lie(
        self, layer: int, index: int, homes: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]
    ) -> None:
        """Let the expert at a stack index lie in `pieces`."""
        for number, (home, piece) in enumerate(zip(homes, pieces, strict=True)):
            self._tables.set_shift(layer, number, index, piece.data_ptr() - home.data_ptr())

    def _copied(
        self, to: Sequence[torch.Tensor], of: Sequence[torch.Tensor], *, away: bool
    ) -> Iterator[bool]:
        """Copy the pieces `of` to the pieces `to` beside steps; yields `away` before each step."""
        for there, here in zip(to, of, strict=True):
            first = 0
            while first < here.nbytes:
                if self._room <= 0:
                    yield away
                    self._join()
                    continue
                end = min(first + self._room, here.nbytes)
                self._follow()
                self._stream.copy((there[first:end], here[first:end]))
                self._room -= end - first
                first = end
        yield away
        self._join()

    def _follow(self) -> None:
        """Let copies wait for the steps so far, which read pieces that no table names any more."""
        if not self._started:
            self._stream.follow()
        self._started = True

    def _join(self) -> None:
        """Let the next step wait for the copies so far."""
        if self._started:
            self._stream.join()
        self._started = False
