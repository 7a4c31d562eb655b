"""compressed-tensors' `pack-quantized`: 4 or 8 bits with a scale per group or row, rows as stored.

`weight_packed` has the elements of a row in int32 words, the lowest bits first, `weight_scale` a
scale for each group, `weight_zero_point` the zeros of 32 / bits rows in a word. Elements and zeros
are stored with half of their range added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from dakrun.units import ceil_div

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PackQuantized(Stored):
    """Elements of `bits` with a scale per `group` columns (0: per row), `zeros` or symmetric."""

    bits: int = 4
    group: int = 128
    zeros: bool = False

    @property
    def name(self) -> str:
        """What people call it."""
        per = f"groups of {self.group}" if self.group else "a scale per row"
        return f"{self.bits}-bit, {per}{' with zeros' if self.zeros else ''}"

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """Elements, scales, and zeros if there are any."""
        per_word, groups = 32 // self.bits, cols // self.group if self.group else 1
        found = (
            Part("weight_packed", (rows, ceil_div(cols, per_word)), ("I32",)),
            Part("weight_scale", (rows, groups), SCALES),
        )
        if not self.zeros:
            return found
        zeros = Part("weight_zero_point", (ceil_div(rows, per_word), groups), ("I32",), per_word)
        return (*found, zeros)

    def layout(self, dtype: str, cols: int) -> Quantised:
        """Integers with a scale per 128 columns, or fewer where groups are smaller."""
        check_divides(self.group, cols)
        code = "int4" if self.bits == 4 else "int8"
        group = device_group(self.group, cols)
        return Quantised(code, group, self._scale_bytes(dtype), self.zeros)  # type: ignore[arg-type]

    def decode(
        self, tensors: "Sequence[torch.Tensor]", rows: slice, cols: int, layout: Quantised
    ) -> "tuple[torch.Tensor, ...]":
        """The unpacked codes, scales and zeros."""
        words, scales, *zeros = tensors
        codes = unpacked(words, self.bits)[:, :cols]
        found = (codes, spread(scales, self.group, layout, cols))
        if not zeros:
            return found
        skipped = rows.start % (32 // self.bits)
        of_rows = unpacked(zeros[0].t(), self.bits).t()[skipped : skipped + len(codes)]
        return (*found, spread(of_rows, self.group, layout, cols))
