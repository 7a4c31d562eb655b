"""AWQ: 4 bits with a scale and a zero per group, stored with the K columns first.

A word has 8 neighbouring rows of the weight, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest
bits on: of `qweight` for a column, of `qzeros` for a group of columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dakrun.formats.device_layout import Quantised
from dakrun.formats.stored import (
    SCALES,
    Part,
    Stored,
    check_divides,
    device_group,
    spread,
    unpacked,
)

if TYPE_CHECKING:
    import torch

BITS = 4
WORD_ROWS = 32 // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(Stored):
    """Elements of 4 bits with scales, and zeros if it has them, per `group` columns (0: all)."""

    group: int = 128
    zeros: bool = True
    by_columns: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """What people call it."""
        per = f"groups of {self.group}" if self.group else "a scale per row"
        return f"4-bit AWQ, {per}{' with zeros' if self.zeros else ''}"

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """Elements, scales, and zeros if there are any. Raises ValueError for rows in no words."""
        if rows % WORD_ROWS:
            raise ValueError(f"words of {WORD_ROWS} rows do not divide its {rows} rows")
        words, groups = rows // WORD_ROWS, cols // self.group if self.group else 1
        found = (
            Part("qweight", (cols, words), ("I32",), 0),
            Part("scales", (groups, rows), SCALES, 0),
        )
        return (*found, Part("qzeros", (groups, words), ("I32",), 0)) if self.zeros else found

    def layout(self, dtype: str, cols: int) -> Quantised:
        """Integers of 4 bits with a scale per 128 columns, or fewer where groups are smaller."""
        check_divides(self.group, cols)
        group = device_group(self.group, cols)
        return Quantised("int4", group, self._scale_bytes(dtype), self.zeros)

    def decode(
        self, tensors: "Sequence[torch.Tensor]", rows: slice, cols: int, layout: Quantised
    ) -> "tuple[torch.Tensor, ...]":
        """The unpacked codes, scales and zeros."""
        import torch

        words, scales, *zeros = tensors

        def of_rows(packed: torch.Tensor) -> torch.Tensor:
            """Integers [R, n] of words [n, M / 8]."""
            first = rows.start // WORD_ROWS
            some = packed[:, first : (rows.stop - 1) // WORD_ROWS + 1]
            top = first * WORD_ROWS
            return unpacked(some, BITS, ORDER)[:, rows.start - top : rows.stop - top].t()

        found = (of_rows(words), spread(scales[:, rows].t(), self.group, layout, cols))
        if not zeros:
            return found
        return (*found, spread(of_rows(zeros[0]), self.group, layout, cols))
