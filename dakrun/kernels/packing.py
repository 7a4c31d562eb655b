"""The packed form of a matrix, which the GPU's kernels read: octets, groups, waves, atoms.

A tier's octets, of 8 rows, are dealt to its CTAs in groups of up to 16, those that a CTA computes
together: CTA c takes the groups c, c + CTAs, ... What the CTAs take at a time, a wave, is stored as
[steps of columns][groups][atoms along the columns][octets], so that CTAs side by side read memory
side by side. An atom is 8 rows x 64 columns of 16-bit elements, 1 KiB: rows of 128 bytes whose
16-byte chunks are swizzled, chunk c of row r at c ^ r, as TMA's 128-byte swizzle would put them.
Rows are padded with zeros to whole octets, columns to multiples of 64.
"""

import math
from dataclasses import dataclass

import torch

from dakrun.octets import OCTET_ROWS, octet_count
from dakrun.units import ceil_div

ATOM_COLS = 64
MAX_GROUP = 16  # octets
DTYPES = (torch.float16, torch.bfloat16)
CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class Split:
    """How a tier's octets are dealt to `ctas`: in turn, in groups, the last maybe smaller.

    A step is `step_cols` columns, a multiple of 64, of a group of `group` octets.
    """

    octets: int
    ctas: int
    group: int
    step_cols: int

    def __post_init__(self) -> None:
        if not 1 <= self.group <= MAX_GROUP or self.step_cols % ATOM_COLS or self.step_cols < 1:
            raise ValueError(f"expected groups of 1 to {MAX_GROUP} and steps of 64s, got {self}")
        if self.octets and self.ctas < 1:
            raise ValueError(f"expected a CTA at least, got {self}")

    @property
    def wave(self) -> int:
        """Octets that the CTAs take at a time."""
        return max(1, self.ctas * self.group)


@dataclass(frozen=True)
class PackedPart:
    """Consecutive octets in one tier: `data` is uint8, 1-D, dealt out as `split`."""

    tier: str
    split: Split
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
            expected = part.split.octets * octet_bytes(self.shape[1])
            if part.data.dtype != torch.uint8 or part.data.shape != (expected,):
                raise ValueError(
                    f"expected {expected} bytes in {part.tier}, got {list(part.data.shape)} of "
                    f"{part.data.dtype}"
                )
        placed = sum(part.split.octets for part in self.parts)
        if placed != octet_count(self.shape[0]):
            raise ValueError(f"{placed} octets are placed of a matrix of {self.shape}")

    def dense(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The matrix [M, K] in one piece."""
        rows, cols = self.shape
        parts = [
            _unpack(part.data.to(device).view(self.dtype), cols, part.split)
            for part in self.parts
            if part.split.octets
        ]
        return torch.cat(parts)[:rows, :cols].contiguous()


def padded_cols(cols: int) -> int:
    """Columns that are stored of `cols`."""
    return ceil_div(cols, ATOM_COLS) * ATOM_COLS


def octet_bytes(cols: int) -> int:
    """Bytes of an octet of a matrix of `cols` columns."""
    return OCTET_ROWS * padded_cols(cols) * 2


def pack(weight: torch.Tensor, split: Split) -> torch.Tensor:
    """Rows of a weight [M, K] that lie in one tier, dealt out as `split`, as bytes (uint8, 1-D).

    `weight` is of a 16-bit dtype on any device; its M is a multiple of 8, but for the last rows.
    """
    if weight.dtype not in DTYPES or weight.dim() != 2:
        raise ValueError(
            f"expected a float16 or bfloat16 matrix, got {weight.dtype} {list(weight.shape)}"
        )
    rows, cols = weight.shape
    octets, width = octet_count(rows), padded_cols(cols)
    if octets != split.octets:
        raise ValueError(f"expected {split.octets} octets, got {octets}")
    if not rows:
        return torch.empty(0, dtype=torch.uint8, device=weight.device)
    padded = torch.nn.functional.pad(weight, (0, width - cols, 0, octets * OCTET_ROWS - rows))
    atoms = padded.view(octets, OCTET_ROWS, width // ATOM_COLS, ATOM_COLS // CHUNK, CHUNK)
    atoms = _swizzled(atoms.permute(2, 0, 1, 3, 4))  # column, octet, row, chunk
    blocks = [
        group.flatten()
        for wave in atoms.split(split.wave, dim=1)
        for step in wave.split(split.step_cols // ATOM_COLS, dim=0)
        for group in step.split(split.group, dim=1)
    ]
    return torch.cat(blocks).view(torch.uint8)


def _unpack(data: torch.Tensor, cols: int, split: Split) -> torch.Tensor:
    """The padded rows [octets * 8, padded_cols(cols)] of one tier."""
    width, at, rows = padded_cols(cols), 0, []
    step_atoms = split.step_cols // ATOM_COLS
    for first in range(0, split.octets, split.wave):
        wave = min(split.wave, split.octets - first)
        steps = []
        for column in range(0, width // ATOM_COLS, step_atoms):
            depth = min(step_atoms, width // ATOM_COLS - column)
            groups = []
            for octet in range(0, wave, split.group):
                shape = (depth, min(split.group, wave - octet), OCTET_ROWS, ATOM_COLS)
                size = math.prod(shape)
                groups.append(data[at : at + size].view(*shape[:3], ATOM_COLS // CHUNK, CHUNK))
                at += size
            steps.append(torch.cat(groups, dim=1))
        atoms = _swizzled(torch.cat(steps))
        rows.append(atoms.permute(1, 2, 0, 3, 4).reshape(-1, width))
    return torch.cat(rows)


def _swizzled(atoms: torch.Tensor) -> torch.Tensor:
    """[..., rows, chunks, elements] with chunk c of row r at c ^ r; its own inverse."""
    rows = torch.arange(OCTET_ROWS, device=atoms.device)[:, None]
    moved = torch.arange(ATOM_COLS // CHUNK, device=atoms.device) ^ rows
    return atoms[..., rows, moved, :]
