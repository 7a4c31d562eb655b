"""Rows as a checkpoint and torch have them: the format of plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dakrun.formats.packed16 import PACKED16
from dakrun.formats.split import Split
from dakrun.formats.weight_format import Array, WeightFormat
from dakrun.geometry import ROWS_PER_BLOCK

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rows(WeightFormat):
    """Elements of the products' dtype, of `element_bytes`, row after row without padding."""

    element_bytes: int
    name = "rows"
    for_kernels = False
    is_view = True

    @property
    def packed(self) -> WeightFormat | None:
        """PACKED16, for elements of 16 bits."""
        return PACKED16 if self.element_bytes == 2 else None

    def arrays(self, cols: int) -> tuple[Array, ...]:
        """One array."""
        size = ROWS_PER_BLOCK * cols * self.element_bytes
        return (Array("elements", size, self.element_bytes, padded=False),)

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of `rows`, without a sum over arrays: the planner asks often."""
        return rows * cols * self.element_bytes

    def takes(self, cols: int) -> bool:
        """Any matrix."""
        return True

    def write(
        self, arrays: "Sequence[torch.Tensor]", split: Split, first: int, *stored: "torch.Tensor"
    ) -> None:
        """Copy rows [R, K]."""
        (rows,) = stored
        top = ROWS_PER_BLOCK * first
        self.read(arrays, split, rows.shape[1], rows.dtype)[top : top + len(rows)] = rows

    def read(
        self, arrays: "Sequence[torch.Tensor]", split: Split, cols: int, dtype: "torch.dtype"
    ) -> "torch.Tensor":
        """A view of the rows [R, K]."""
        return arrays[0].view(dtype).view(-1, cols)
