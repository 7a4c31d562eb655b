"""The interface of a weight format: what loader, planner, kernels and reports ask of it.

Knows rows, columns and bytes; neither tiers nor plans.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dakrun.formats.split import Split, stretches
from dakrun.geometry import ATOM_COLS, ROWS_PER_BLOCK, row_block_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Array:
    """One of the arrays of bytes in which a format stores elements; it can be placed by itself.

    A row block takes `row_block_bytes`; the array's address is a multiple of `alignment`. If
    `padded`, the last row block of a matrix takes as many bytes, even if it has fewer rows.
    """

    name: str
    row_block_bytes: int
    alignment: int
    padded: bool

    def nbytes(self, rows: int) -> int:
        """Bytes of `rows` of a matrix, the first of which begins a row block."""
        stored = ROWS_PER_BLOCK * row_block_count(rows) if self.padded else rows
        return self.row_block_bytes * stored // ROWS_PER_BLOCK


class WeightFormat(ABC):
    """How the elements of a matrix [M, K] are stored, row block by row block.

    A part of the matrix is a tensor of bytes (uint8, 1-D) for each of `arrays`, in their order.
    """

    name: str
    for_kernels: ClassVar[bool]
    is_view: ClassVar[bool] = False  # whether `read` gives a view of the arrays
    # Macros that select the code in native/ that turns stored bytes into operands.
    macros: ClassVar[Mapping[str, int]] = {}

    @property
    @abstractmethod
    def packed(self) -> "WeightFormat | None":
        """The format in which kernels read these elements; None if they have to be unpacked."""

    @abstractmethod
    def arrays(self, cols: int) -> tuple[Array, ...]:
        """The arrays of a matrix with `cols` columns."""

    @abstractmethod
    def takes(self, cols: int) -> bool:
        """Whether products with a matrix of `cols` columns can read this format."""

    @abstractmethod
    def write(
        self, arrays: "Sequence[torch.Tensor]", split: Split, first: int, *stored: "torch.Tensor"
    ) -> None:
        """Store rows as the row blocks from `first` on of a tier's `arrays`.

        The row blocks are one of `stretches` of the tier's `split`. `stored` has the checkpoint's
        tensors for these rows, on the device that writes the arrays: a single one, [R, K], where
        the checkpoint has plain elements.
        """

    @abstractmethod
    def read(
        self, arrays: "Sequence[torch.Tensor]", split: Split, cols: int, dtype: "torch.dtype"
    ) -> "torch.Tensor":
        """The rows [R, K] of a tier in `dtype`: the reference for the device code.

        R is a multiple of 8 in padded formats. May view `arrays`.
        """

    def pack(self, rows: "torch.Tensor", split: Split) -> "tuple[torch.Tensor, ...]":
        """Pack plain elements, rows [R, K], into new arrays of a tier.

        R is a multiple of 8, or the rows are the matrix's last. Raises ValueError unless R rows are
        `split.row_blocks` row blocks.
        """
        if row_block_count(len(rows)) != split.row_blocks:
            raise ValueError(
                f"expected {split.row_blocks} row blocks, got {row_block_count(len(rows))}"
            )
        import torch

        arrays = tuple(
            torch.empty(array.nbytes(len(rows)), dtype=torch.uint8, device=rows.device)
            for array in self.arrays(rows.shape[1])
        )
        for first, count in stretches(split, split.row_blocks):
            top = ROWS_PER_BLOCK * first
            self.write(arrays, split, first, rows[top : top + ROWS_PER_BLOCK * count])
        return arrays

    @functools.cached_property
    def atom_bytes(self) -> int:
        """Bytes of 64 columns of a row block, of which stages of kernels' rings are made."""
        return self.row_block_bytes(ATOM_COLS)

    def row_block_bytes(self, cols: int) -> int:
        """Bytes of a whole row block of a matrix with `cols` columns."""
        return self.nbytes(ROWS_PER_BLOCK, cols)

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of `rows`, the first of which begins a row block, of a matrix with `cols`."""
        return sum(array.nbytes(rows) for array in self.arrays(cols))
