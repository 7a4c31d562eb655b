"""Matrices whose row blocks are partitioned over memory tiers, each part in a weight format.

Knows row blocks, formats and tiers; neither what the rows mean nor how they are multiplied.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dakrun.formats import Split, WeightFormat, stretches
from dakrun.geometry import LINE_BYTES, ROWS_PER_BLOCK, first_row, row_block_count
from dakrun.memory.device import device_view
from dakrun.memory.tiers import Tier, aligned

PIECE_ELEMENTS = 1 << 22  # elements to write at a time: packing needs as much memory again


@dataclass(frozen=True)
class MatrixPart:
    """Consecutive row blocks of a matrix in one tier, those of `split`, stored in `format`.

    `arrays` are bytes, uint8 1-D, one tensor for each array of the format.
    """

    tier: str
    split: Split
    format: WeightFormat
    arrays: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def row_blocks(self, cols: int, first: int, last: int) -> "MatrixPart":
        """Row blocks `first` to `last` - 1, which follow each other, as views.

        The matrix has `cols` columns.
        """
        alone = self.split.wave == 1 or self.split.height == last - first
        assert alone, "row blocks follow each other, or are a whole matrix"
        arrays = zip(self.format.arrays(cols), self.arrays, strict=True)
        some = (data[of.row_block_bytes * first : of.row_block_bytes * last] for of, data in arrays)
        split = replace(self.split, row_blocks=last - first, height=0, cut=0)
        return replace(self, split=split, arrays=tuple(some))


@dataclass(frozen=True)
class Piece:
    """Rows `rows` of a matrix, which are the row blocks of `part` from its row block `first` on."""

    part: MatrixPart
    first: int
    rows: slice

    def write(self, *stored: torch.Tensor) -> None:
        """Store the checkpoint's tensors for these rows, on the device that reads the tier.

        `stored` is a single tensor [R, K], in the matrix's dtype, where the checkpoint has plain
        elements. A GPU writes by itself, to host memory too, in the order of torch's current
        stream.
        """
        arrays = [device_view(array, stored[0].device) for array in self.part.arrays]
        self.part.format.write(arrays, self.part.split, self.first, *stored)


@dataclass(frozen=True)
class TieredMatrix:
    """A matrix [M, K] whose row blocks lie in several tiers; parts are in the order of its rows.

    Products with it are in `dtype`. Where it stacks experts that may move, `shifts`, int64 [E] on
    the device that computes, has the bytes from each index of the stack to the expert's memory.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[MatrixPart, ...]
    shifts: torch.Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        cols = self.shape[1]
        placed = sum(part.split.row_blocks for part in self.parts)
        if placed != row_block_count(self.shape[0]):
            raise ValueError(
                f"expected {row_block_count(self.shape[0])} row blocks for a matrix of "
                f"{self.shape}, got {placed}"
            )
        for part, rows in self.rows:
            for array, data in zip(part.format.arrays(cols), part.arrays, strict=True):
                expected = array.nbytes(rows.stop - rows.start)
                if (
                    data.dtype != torch.uint8
                    or data.shape != (expected,)
                    or data.data_ptr() % array.alignment
                ):
                    raise ValueError(
                        f"expected {expected} bytes of {array.name} in {part.tier}, aligned to "
                        f"{array.alignment}, got {list(data.shape)} of {data.dtype}"
                    )

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        format: WeightFormat,
        placement: Sequence[tuple[str, int]],
        tiers: Mapping[str, Tier],
        splits: Sequence[Split] | None = None,
    ) -> "TieredMatrix":
        """Allocate an uninitialised matrix [M, K] with `placement`, (tier, row blocks) in order.

        Every tier gets a part, which may be empty. `splits` has the split of each part, for a
        format that kernels read. Raises ValueError if the row blocks do not add up to M rows,
        MemoryError if a tier is full.
        """
        splits = splits or [Split(count) for _, count in placement]
        parts, first = [], 0
        for (tier, count), split in zip(placement, splits, strict=True):
            rows = first_row(first + count, shape[0]) - first_row(first, shape[0])
            arrays = tuple(
                tiers[tier].allocate((ahead + size,), torch.uint8)[ahead:]
                for ahead, size in _sizes(format, rows, shape[1], split.height, split.cut)
            )
            parts.append(MatrixPart(tier, split, format, arrays))
            first += count
        return cls(shape, dtype, tuple(parts))

    @functools.cached_property
    def rows(self) -> tuple[tuple[MatrixPart, slice], ...]:
        """The parts, each with its rows."""
        found, first, height = [], 0, self.shape[0]
        for part in self.parts:
            last = first + part.split.row_blocks
            found.append((part, slice(first_row(first, height), first_row(last, height))))
            first = last
        return tuple(found)

    @functools.cached_property
    def row_blocks_by_tier(self) -> tuple[tuple[str, int], ...]:
        """Row blocks by tier, in row order.

        Consecutive parts in one tier, such as local rows and the staged rows behind them, are one.
        """
        runs = itertools.groupby(self.parts, key=lambda part: part.tier)
        return tuple((tier, sum(part.split.row_blocks for part in parts)) for tier, parts in runs)

    def stacked(self, number: int, count: int) -> MatrixPart | None:
        """Matrix `number` of the `count` that this one stacks, as views.

        None unless it lies in one piece, in one tier.
        """
        height = self.shape[0] // count
        start, stop = number * height, (number + 1) * height
        for part, rows in self.rows:
            whole = start % ROWS_PER_BLOCK == height % ROWS_PER_BLOCK == 0
            if rows.start <= start and stop <= rows.stop and whole:
                first, last = ((at - rows.start) // ROWS_PER_BLOCK for at in (start, stop))
                one_piece = part.split.height == last - first or part.split.wave == 1
                return part.row_blocks(self.shape[1], first, last) if one_piece else None
        return None

    def read(self, part: MatrixPart, device: torch.device | str | None = None) -> torch.Tensor:
        """The rows [R, K] of a part, with padding rows, on `device`, by default where it lies."""
        arrays = [array if device is None else array.to(device) for array in part.arrays]
        return part.format.read(arrays, part.split, self.shape[1], self.dtype)

    def dense_rows(
        self, elements: int, device: torch.device
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """All rows on `device`, part by part: rows of the matrix, and their elements [R, K].

        Up to `elements` come together where elements are expanded and row blocks follow each other.
        """
        limit = max(1, elements // (ROWS_PER_BLOCK * self.shape[1]))
        for part, rows in self.rows:
            count = part.split.row_blocks
            if part.format.is_view or part.split.wave > 1 or count <= limit:
                if count:
                    yield rows, self.read(part, device)[: rows.stop - rows.start]
                continue
            for first in range(0, count, limit):
                last = min(first + limit, count)
                some = self.read(part.row_blocks(self.shape[1], first, last), device)
                top = rows.start + ROWS_PER_BLOCK * first
                found = slice(top, min(top + len(some), rows.stop))
                yield found, some[: found.stop - top]

    @property
    def for_kernels(self) -> bool:
        """Whether kernels read the formats of all parts."""
        return all(part.format.for_kernels for part in self.parts)

    @property
    def format(self) -> WeightFormat:
        """The format of the first part: of all, in a matrix that kernels read."""
        return self.parts[0].format

    @functools.cached_property
    def descriptions(self) -> dict[torch.device, Any]:
        """What kernels on a device have made of this matrix, for their next launches."""
        return {}

    @functools.cached_property
    def _addresses(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def addresses(self, device: torch.device) -> torch.Tensor:
        """Addresses of the parts' arrays, int64 [parts, arrays] on `device`: a table for kernels.

        All parts must have the same number of arrays. Launches and captured graphs read addresses
        from the table. To move an array, write its new address there between two launches.
        """
        if device not in self._addresses:
            lie = [[array.data_ptr() for array in part.arrays] for part in self.parts]
            self._addresses[device] = torch.tensor(lie, dtype=torch.int64, device=device)
        return self._addresses[device]

    def dense(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A copy of the matrix [M, K] in one tensor on `device`."""
        out = torch.empty(self.shape, dtype=self.dtype, device=device)
        for part, rows in self.rows:
            out[rows] = self.read(part, device)[: rows.stop - rows.start]
        return out

    def pieces(self, elements: int) -> Iterator[Piece]:
        """Divide the matrix, in row order, into pieces of up to `elements`; one group at least."""
        height, cols = self.shape
        limit = elements // (ROWS_PER_BLOCK * cols)
        before = 0
        for part in self.parts:
            for first, count in stretches(part.split, limit):
                top = before + first
                rows = slice(first_row(top, height), first_row(top + count, height))
                yield Piece(part, first, rows)
            before += part.split.row_blocks


def allocated_bytes(
    format: WeightFormat, shape: tuple[int, int], counts: Sequence[int], height: int = 0
) -> list[int]:
    """Bytes that a matrix takes in each tier, alignment included, for `counts` of row blocks.

    It may be a stack of matrices of `height` row blocks each.
    """
    sizes, first = [], 0
    for count in counts:
        rows = first_row(first + count, shape[0]) - first_row(first, shape[0])
        cut = first % height if height else 0
        sizes.append(sum(aligned(sum(of)) for of in _sizes(format, rows, shape[1], height, cut)))
        first += count
    return sizes


def _sizes(
    format: WeightFormat, rows: int, cols: int, height: int, cut: int
) -> list[tuple[int, int]]:
    """Bytes of each array of a part with `rows`, and how many are left free ahead of them.

    So many that stacked matrices of `height` row blocks begin with whole lines if they can, though
    the part lacks the first `cut` row blocks of its first one.
    """
    rest = -cut % height if height and rows else 0  # row blocks ahead of the first whole matrix
    return [
        (-rest * array.row_block_bytes % LINE_BYTES, array.nbytes(rows))
        for array in format.arrays(cols)
    ]
