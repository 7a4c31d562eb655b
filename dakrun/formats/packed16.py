"""16-bit elements in atoms, as the GEMM kernels read them.

An atom is 8 rows x 64 columns of 16-bit elements, 1 KiB: rows of 128 bytes whose 16-byte chunks are
swizzled, chunk c of row r at c ^ r, as by TMA's 128-byte swizzle. Rows are padded with zeros to
whole row blocks, columns to multiples of 64. split.py has the order of the atoms.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dakrun.formats.split import Split, load_atoms, store_atoms
from dakrun.formats.weight_format import Array, WeightFormat
from dakrun.geometry import ATOM_BYTES, ATOM_COLS, CHUNK, ROWS_PER_BLOCK, row_block_count
from dakrun.units import ceil_div

_CHUNKS = ATOM_COLS // CHUNK  # of a row of an atom

if TYPE_CHECKING:
    import torch


class Packed16(WeightFormat):
    """float16 or bfloat16 elements of the products' dtype, packed."""

    name = "16-bit"
    for_kernels = True

    @property
    def packed(self) -> WeightFormat:
        """This format."""
        return self

    def arrays(self, cols: int) -> tuple[Array, ...]:
        """One array of atoms."""
        return (Array("elements", ATOM_BYTES * ceil_div(cols, ATOM_COLS), 16, padded=True),)

    def takes(self, cols: int) -> bool:
        """Columns in multiples of CHUNK."""
        return cols % CHUNK == 0

    def write(
        self, arrays: "Sequence[torch.Tensor]", split: Split, first: int, *stored: "torch.Tensor"
    ) -> None:
        """Pack rows [R, K] of a 16-bit dtype."""
        import torch

        (rows,) = stored
        if rows.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"expected a float16 or bfloat16 matrix, got {rows.dtype}")
        height, cols = rows.shape
        row_blocks, columns = row_block_count(height), ceil_div(cols, ATOM_COLS)
        padded = rows.new_zeros(row_blocks * ROWS_PER_BLOCK, columns * ATOM_COLS)
        padded[:height, :cols] = rows
        words = padded.view(torch.int64).view(row_blocks, ROWS_PER_BLOCK, columns, _CHUNKS, 2)
        atoms = _swizzled(words.permute(2, 0, 1, 3, 4))  # column, row block, row, chunk
        store_atoms(arrays[0], split, first, atoms.flatten(2))

    def read(
        self, arrays: "Sequence[torch.Tensor]", split: Split, cols: int, dtype: "torch.dtype"
    ) -> "torch.Tensor":
        """Unpack the rows [row blocks * 8, K] of a tier."""
        import torch

        columns = ceil_div(cols, ATOM_COLS)
        like = arrays[0].new_empty((columns, 0, ATOM_BYTES // 8), dtype=torch.int64)
        atoms = load_atoms(arrays[0], split, like)
        atoms = _swizzled(atoms.view(columns, split.row_blocks, ROWS_PER_BLOCK, _CHUNKS, 2))
        rows = atoms.permute(1, 2, 0, 3, 4).reshape(-1, columns * ATOM_COLS // 4)
        return rows.view(dtype)[:, :cols]


def _swizzled(atoms: "torch.Tensor") -> "torch.Tensor":
    """Swizzle or unswizzle atoms [..., rows, chunks, 16 bytes]: chunk c of row r is at c ^ r."""
    import torch

    rows = torch.arange(ROWS_PER_BLOCK, device=atoms.device)[:, None]
    moved = torch.arange(_CHUNKS, device=atoms.device) ^ rows
    return atoms[..., rows, moved, :]


PACKED16 = Packed16()
