"""Items: the unit in which a matrix is placed (DESIGN.md, tiers and storage).

An item is 64 output rows x 1,024 input columns; items are numbered along a band of 64 rows,
band after band, so that a run of items is whole bands except at its two ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass

ITEM_ROWS = 64
ITEM_COLS = 1024


@dataclass(frozen=True)
class ItemGrid:
    """The items of a matrix of `rows` x `cols` elements; those at the far edges are smaller."""

    rows: int
    cols: int

    @property
    def segments(self) -> int:
        """Items in a band."""
        return -(-self.cols // ITEM_COLS)

    @property
    def count(self) -> int:
        """Items in the matrix."""
        return -(-self.rows // ITEM_ROWS) * self.segments

    def elements(self, first: int, last: int) -> int:
        """Number of elements in the items first ... last - 1."""
        return self._before(last) - self._before(first)

    def _before(self, item: int) -> int:
        band, segment = divmod(item, self.segments)
        band_rows = min(ITEM_ROWS, self.rows - band * ITEM_ROWS) if segment else 0
        return min(band * ITEM_ROWS, self.rows) * self.cols + band_rows * segment * ITEM_COLS

    def rectangles(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """The items first ... last - 1 as at most three (rows, cols) rectangles, in order."""
        while first < last:
            band, segment = divmod(first, self.segments)
            bands = (last - first) // self.segments if segment == 0 else 0
            run = bands * self.segments or min(last - first, self.segments - segment)
            top, left = band * ITEM_ROWS, segment * ITEM_COLS
            right = self.cols if bands else min(left + run * ITEM_COLS, self.cols)
            bottom = min(top + max(bands, 1) * ITEM_ROWS, self.rows)
            yield slice(top, bottom), slice(left, right)
            first += run
