"""The packed form of a matrix, which the GPU's kernels read: octets, groups, atoms.

An octet is 8 rows and, like the plan's item, lies in one tier. A tier's octets are stored in groups
of up to 8, those that a CTA computes together (the last group may have fewer): a group is
[columns / 64][octets][atom], so that any run of its columns is contiguous. An atom is 8 rows x 64
columns of 16-bit elements, 1 KiB: rows of 128 bytes whose 16-byte chunks are swizzled, chunk c of
row r at c ^ r, as TMA's 128-byte swizzle would put them. Rows are padded with zeros to whole
octets, columns to multiples of 128.
"""

from dataclasses import dataclass

import torch

from dakrun.units import ceil_div

OCTET_ROWS = 8
ATOM_COLS = 64
PADDED_COLS = 128
MAX_GROUP = 8  # octets
DTYPES = (torch.float16, torch.bfloat16)
CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class PackedPart:
    """Consecutive octets in one tier, in groups of `group`: `data` is uint8, 1-D."""

    tier: str
    octets: int
    group: int
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
            if not 1 <= part.group <= MAX_GROUP:
                raise ValueError(f"expected groups of 1 to {MAX_GROUP} octets, got {part.group}")
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
        rows, cols = self.shape
        parts = [
            _unpack(part.data.to(device).view(self.dtype), cols, part.group)
            for part in self.parts
            if part.octets
        ]
        return torch.cat(parts)[:rows, :cols].contiguous()


def octet_count(rows: int) -> int:
    """Octets of a matrix of `rows`."""
    return ceil_div(rows, OCTET_ROWS)


def padded_cols(cols: int) -> int:
    """Columns that are stored of `cols`."""
    return ceil_div(cols, PADDED_COLS) * PADDED_COLS


def octet_bytes(cols: int) -> int:
    """Bytes of an octet of a matrix of `cols` columns."""
    return OCTET_ROWS * padded_cols(cols) * 2


def pack(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Rows of a weight [M, K] that lie in one tier, in groups of octets, as bytes (uint8, 1-D).

    `weight` is of a 16-bit dtype on any device; its M is a multiple of 8, but for the last rows.
    """
    if weight.dtype not in DTYPES or weight.dim() != 2:
        raise ValueError(f"expected a float16 or bfloat16 matrix, got {weight.dtype}")
    rows, cols = weight.shape
    octets, width = octet_count(rows), padded_cols(cols)
    if not rows:
        return torch.empty(0, dtype=torch.uint8, device=weight.device)
    padded = torch.nn.functional.pad(weight, (0, width - cols, 0, octets * OCTET_ROWS - rows))
    atoms = padded.view(octets, OCTET_ROWS, width // ATOM_COLS, ATOM_COLS // CHUNK, CHUNK)
    swizzled = _swizzled(atoms.permute(2, 0, 1, 3, 4))  # column, octet, row, chunk
    groups = [part.flatten() for part in swizzled.split(group, dim=1)]
    return torch.cat(groups).view(torch.uint8)


def _unpack(data: torch.Tensor, cols: int, group: int) -> torch.Tensor:
    """The padded rows [octets * 8, padded_cols(cols)] of one tier."""
    width = padded_cols(cols)
    rows = []
    for part in data.split(group * OCTET_ROWS * width):
        atoms = part.view(width // ATOM_COLS, -1, OCTET_ROWS, ATOM_COLS // CHUNK, CHUNK)
        rows.append(_swizzled(atoms).permute(1, 2, 0, 3, 4).reshape(-1, width))
    return torch.cat(rows)


def _swizzled(atoms: torch.Tensor) -> torch.Tensor:
    """[..., rows, chunks, elements] with chunk c of row r at c ^ r; its own inverse."""
    rows = torch.arange(OCTET_ROWS, device=atoms.device)[:, None]
    moved = torch.arange(ATOM_COLS // CHUNK, device=atoms.device) ^ rows
    return atoms[..., rows, moved, :]
