"""The packed form of a matrix, which the GPU's kernels read: atoms and octets (native/*.cu).

An octet is 8 rows and, like the plan's item, lies in one tier. It is a run of atoms of 8 rows x 64
columns of 16-bit elements, 1 KiB each: rows of 128 bytes whose 16-byte chunks are swizzled, chunk c
of row r at c ^ r, as TMA's 128-byte swizzle would put them. Rows are padded with zeros to whole
octets, columns to multiples of 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dakrun.units import ceil_div

OCTET_ROWS = 8
ATOM_COLS = 64
BLOCK_COLS = 128
DTYPES = (torch.float16, torch.bfloat16)
CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class PackedPart:
    """Consecutive octets in one tier: `data` is uint8, 1-D."""

    tier: str
    octets: int
    data: torch.Tensor


@dataclass(frozen=True)
class PackedTensor:
    """A matrix [M, K] of packed octets, the parts in the order of the rows."""

    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[PackedPart, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"expected float16 or bfloat16, got {self.dtype}")
        for part in self.parts:
            expected = part.octets * octet_bytes(self.shape[1])
            if part.data.dtype != torch.uint8 or part.data.shape != (expected,):
                raise ValueError(
                    f"expected {expected} bytes in {part.tier}, got {list(part.data.shape)} of "
                    f"{part.data.dtype}"
                )
        placed = sum(part.octets for part in self.parts)
        if placed != octet_count(self.shape[0]):
            raise ValueError(f"{placed} octets are placed of a matrix of {self.shape}")

    def dense(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The matrix [M, K] in one piece."""
        data = torch.cat([part.data.to(device) for part in self.parts]).view(self.dtype)
        (rows, cols), width = self.shape, padded_cols(self.shape[1])
        atoms = data.view(-1, width // ATOM_COLS, OCTET_ROWS, ATOM_COLS // CHUNK, CHUNK)
        return _swizzled(atoms).transpose(1, 2).reshape(-1, width)[:rows, :cols].contiguous()


def octet_count(rows: int) -> int:
    """Octets of a matrix of `rows`."""
    return ceil_div(rows, OCTET_ROWS)


def padded_cols(cols: int) -> int:
    """Columns that are stored of `cols`."""
    return ceil_div(cols, BLOCK_COLS) * BLOCK_COLS


def octet_bytes(cols: int) -> int:
    """Bytes of an octet of a matrix of `cols` columns."""
    return OCTET_ROWS * padded_cols(cols) * 2


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [M, K] of a 16-bit dtype, on any device, as packed bytes (uint8, 1-D)."""
    if weight.dtype not in DTYPES or weight.dim() != 2:
        raise ValueError(f"expected a float16 or bfloat16 matrix, got {weight.dtype}")
    rows, cols = weight.shape
    octets, width = octet_count(rows), padded_cols(cols)
    padded = torch.nn.functional.pad(weight, (0, width - cols, 0, octets * OCTET_ROWS - rows))
    chunks = padded.view(octets, OCTET_ROWS, width // ATOM_COLS, ATOM_COLS // CHUNK, CHUNK)
    return _swizzled(chunks.transpose(1, 2)).contiguous().view(torch.uint8).flatten()


def split(data: torch.Tensor, cols: int, octets: Sequence[int]) -> list[torch.Tensor]:
    """Views of the packed bytes of a matrix of `cols` columns: `octets` each, in order."""
    return list(data.split([count * octet_bytes(cols) for count in octets]))


def _swizzled(atoms: torch.Tensor) -> torch.Tensor:
    """[..., rows, chunks, elements] with chunk c of row r at c ^ r; its own inverse."""
    rows = torch.arange(OCTET_ROWS, device=atoms.device)[:, None]
    moved = torch.arange(ATOM_COLS // CHUNK, device=atoms.device) ^ rows
    return atoms[..., rows, moved, :]
