"""The packed layout of a matrix that the GEMM kernels read: row blocks, groups, waves, atoms.

A tier's row blocks, of 8 rows, are assigned round-robin to its CTAs, in groups of up to 16 that a
CTA computes together: CTA c takes the groups c, c + CTAs, ... A wave is one group for each CTA. It
is stored as [steps of columns][groups][atoms along the columns][row blocks], so that CTAs side by
side read memory side by side. An atom is 8 rows x 64 columns of 16-bit elements, 1 KiB: rows of 128
bytes whose 16-byte chunks are swizzled, chunk c of row r at c ^ r, as by TMA's 128-byte swizzle.
Rows are padded with zeros to whole row blocks, columns to multiples of 64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dakrun.geometry import ATOM_COLS, CHUNK, MAX_GROUP_ROW_BLOCKS, ROWS_PER_BLOCK, row_block_count
from dakrun.kernels.runtime.operands import DTYPES
from dakrun.units import ceil_div

_ATOM = ROWS_PER_BLOCK * ATOM_COLS // 4  # words of 8 bytes


@dataclass(frozen=True)
class Split:
    """How a tier's `row_blocks` are assigned to `ctas`: round-robin, `group` row blocks at a time.

    The last group may be smaller. `step_cols` columns of a group, a multiple of 64, lie together.
    If `mixed`, the row blocks are stored like this but computed by the local tier's CTAs, which
    take the groups of both tiers.
    """

    row_blocks: int
    ctas: int
    group: int
    step_cols: int
    mixed: bool = False

    def __post_init__(self) -> None:
        if (
            not 1 <= self.group <= MAX_GROUP_ROW_BLOCKS
            or self.step_cols % ATOM_COLS
            or self.step_cols < 1
        ):
            raise ValueError(
                f"expected groups of 1 to {MAX_GROUP_ROW_BLOCKS} row blocks and steps of a "
                f"multiple of {ATOM_COLS} columns, got {self}"
            )
        if self.row_blocks and self.ctas < 1:
            raise ValueError(f"expected at least one CTA, got {self}")

    @property
    def wave(self) -> int:
        """Row blocks of a wave: one group for each CTA."""
        return max(1, self.ctas * self.group)


@dataclass(frozen=True)
class PackedPart:
    """Consecutive row blocks of a matrix in one tier, packed by `split`: `data` is uint8, 1-D."""

    tier: str
    split: Split
    data: torch.Tensor


@dataclass(frozen=True)
class PackedTensor:
    """A matrix [M, K] of packed row blocks; the parts are in the order of its rows."""

    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[PackedPart, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"expected float16 or bfloat16, got {self.dtype}")
        for part in self.parts:
            expected = part.split.row_blocks * row_block_bytes(self.shape[1])
            if part.data.dtype != torch.uint8 or part.data.shape != (expected,):
                raise ValueError(
                    f"expected {expected} bytes in {part.tier}, got {list(part.data.shape)} of "
                    f"{part.data.dtype}"
                )
        placed = sum(part.split.row_blocks for part in self.parts)
        if placed != row_block_count(self.shape[0]):
            raise ValueError(
                f"expected {row_block_count(self.shape[0])} row blocks for a matrix of "
                f"{self.shape}, got {placed}"
            )

    def dense(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Unpack the matrix [M, K]."""
        rows, cols = self.shape
        parts = [
            _unpack(part.data.to(device), cols, part.split).view(self.dtype)
            for part in self.parts
            if part.split.row_blocks
        ]
        return torch.cat(parts)[:rows, :cols].contiguous()


def padded_cols(cols: int) -> int:
    """`cols` rounded up to whole atoms."""
    return ceil_div(cols, ATOM_COLS) * ATOM_COLS


def row_block_bytes(cols: int) -> int:
    """Bytes of a row block of a 16-bit matrix with `cols` columns."""
    return ROWS_PER_BLOCK * padded_cols(cols) * 2


def pack(weight: torch.Tensor, split: Split) -> torch.Tensor:
    """Pack a tier's rows of a weight, [M, K] of a 16-bit dtype, into bytes (uint8, 1-D).

    M is a multiple of 8 unless these are the weight's last rows. Raises ValueError for another
    dtype, or an M that is not `split.row_blocks`.
    """
    if weight.dtype not in DTYPES or weight.dim() != 2:
        raise ValueError(
            f"expected a float16 or bfloat16 matrix, got {weight.dtype} {list(weight.shape)}"
        )
    if row_block_count(len(weight)) != split.row_blocks:
        raise ValueError(
            f"expected {split.row_blocks} row blocks, got {row_block_count(len(weight))}"
        )
    data = weight.new_empty(split.row_blocks * row_block_bytes(weight.shape[1]), dtype=torch.uint8)
    for first, count in stretches(split, split.row_blocks):
        write(weight[ROWS_PER_BLOCK * first : ROWS_PER_BLOCK * (first + count)], split, data, first)
    return data


def stretches(split: Split, limit: int) -> Iterator[tuple[int, int]]:
    """Divide a tier's row blocks into pieces (first, count) for `write`, of up to `limit` each.

    A piece is whole waves, or whole groups of one wave where a wave exceeds `limit`; one group at
    least.
    """
    limit, first = max(1, limit // split.group) * split.group, 0
    while first < split.row_blocks:
        left, skipped = split.row_blocks - first, first % split.wave
        count = min(limit, left, split.wave - skipped)
        if count == split.wave:
            count = min(limit, left) // split.wave * split.wave
        yield first, count
        first += count


def write(weight: torch.Tensor, split: Split, data: torch.Tensor, first: int) -> None:
    """Pack the rows of one of `stretches` into the tier's bytes `data`.

    `weight` [M, K], of a 16-bit dtype, holds the row blocks from `first` on.
    """
    rows, cols = weight.shape
    row_blocks, width = row_block_count(rows), padded_cols(cols)
    padded = weight.new_zeros(row_blocks * ROWS_PER_BLOCK, width)
    padded[:rows, :cols] = weight
    words = padded.view(torch.int64).view(row_blocks, ROWS_PER_BLOCK, -1, ATOM_COLS // CHUNK, 2)
    atoms = _swizzled(words.permute(2, 0, 1, 3, 4))  # column, row block, row, chunk
    for stored, of in _matching_views(data, split, first, atoms.flatten(2)):
        stored.copy_(of)


def _unpack(data: torch.Tensor, cols: int, split: Split) -> torch.Tensor:
    """Unpack a tier's bytes to padded rows [row blocks * 8, padded_cols(cols)]."""
    columns, pieces = padded_cols(cols) // ATOM_COLS, []
    for first, count in stretches(split, split.row_blocks):
        atoms = data.new_empty((columns, count, _ATOM), dtype=torch.int64)
        for stored, to in _matching_views(data, split, first, atoms):
            to.copy_(stored)
        pieces.append(atoms)
    shape = (columns, split.row_blocks, ROWS_PER_BLOCK, ATOM_COLS // CHUNK, 2)
    atoms = _swizzled(torch.cat(pieces, 1).view(shape))
    return atoms.permute(1, 2, 0, 3, 4).reshape(split.row_blocks * ROWS_PER_BLOCK, -1)


def _matching_views(
    data: torch.Tensor, split: Split, first: int, atoms: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal views: one of a tier's bytes, one of the atoms that are stored there.

    `atoms`, int64 [columns, row blocks, 128], are those of one of `stretches`, from row block
    `first` on. Views are [waves, steps, groups, columns of a step, row blocks of a group, 128].
    """
    columns, row_blocks = atoms.shape[:2]
    skipped, waves = first % split.wave, max(1, row_blocks // split.wave)
    wave, here = min(split.wave, split.row_blocks - first + skipped), row_blocks // waves
    words = data.view(torch.int64)[(first - skipped) * columns * _ATOM :]
    words = words[: waves * wave * columns * _ATOM].view(waves, -1)
    atoms = atoms.view(columns, waves, here, _ATOM)
    for column, steps, depth in _runs(columns, split.step_cols // ATOM_COLS):
        step = words[:, column * wave * _ATOM : (column + steps * depth) * wave * _ATOM]
        step = step.view(waves, steps, -1)
        some = atoms[column : column + steps * depth]
        for row_block, groups, size in _runs(here, split.group):
            start, end = skipped + row_block, skipped + row_block + groups * size
            stored = step[..., start * depth * _ATOM : end * depth * _ATOM]
            of = some[:, :, row_block : row_block + groups * size]
            of = of.view(steps, depth, waves, groups, size, _ATOM).permute(2, 0, 3, 1, 4, 5)
            yield stored.view(waves, steps, groups, depth, size, _ATOM), of


def _runs(count: int, size: int) -> list[tuple[int, int, int]]:
    """Divide `count` into pieces of `size` and a rest: runs (first, pieces, size of each)."""
    whole, rest = divmod(count, size)
    runs = ((0, whole, size), (whole * size, 1, rest))
    return [(first, pieces, each) for first, pieces, each in runs if pieces * each]


def _swizzled(atoms: torch.Tensor) -> torch.Tensor:
    """Swizzle or unswizzle atoms [..., rows, chunks, words]: chunk c of row r is at c ^ r."""
    rows = torch.arange(ROWS_PER_BLOCK, device=atoms.device)[:, None]
    moved = torch.arange(ATOM_COLS // CHUNK, device=atoms.device) ^ rows
    return atoms[..., rows, moved, :]
