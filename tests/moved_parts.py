"""Moves the parts of matrices, as kernels see them."""

from dataclasses import replace

import torch

from dakrun.memory.matrix import TieredMatrix


class Movable:
    """A copy of a matrix, whose parts move."""

    def __init__(self, matrix: TieredMatrix) -> None:
        parts = (replace(part, arrays=_copies(part.arrays)) for part in matrix.parts)
        self.matrix = replace(matrix, parts=tuple(parts))
        self._lie = [part.arrays for part in self.matrix.parts]

    def move(self, device: torch.device) -> None:
        """Copy all parts elsewhere and spoil what is left; the table on `device` says where."""
        addresses = self.matrix.addresses(device)
        for number, arrays in enumerate(self._lie):
            self._lie[number] = _copies(arrays)
            for place, array in enumerate(self._lie[number]):
                addresses[number, place] = array.data_ptr()
            for array in arrays:
                array.fill_(255)


def _copies(arrays: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(a, pin_memory=a.is_pinned()).copy_(a) for a in arrays)
