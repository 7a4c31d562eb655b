"""GPTQ: 4 or 8 bits with a scale and a zero per group, stored with the K columns first.

A word of `qweight` has neighbouring columns of a row, a word of `qzeros` the zeros of neighbouring
rows, both the lowest bits first. Version 1 of the format stores each zero less 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dakrun.formats.device_layout import Quantised
from dakrun.formats.stored import (
    SCALES,
    Malformed,
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
class Gptq(Stored):
    """Elements of `bits` with scales and zeros per `group` columns (0: all).

    All zeros of a symmetric one are half the range: they are checked, and not kept.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    version: int = 1
    by_columns: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """What people call it."""
        per = f"groups of {self.group}" if self.group else "a scale per row"
        return f"{self.bits}-bit GPTQ, {per}{'' if self.symmetric else ' with zeros'}"

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """Elements, scales, zeros, and the group of each column, which may be missing."""
        per_word, groups = 32 // self.bits, cols // self.group if self.group else 1
        return (
            Part("qweight", (ceil_div(cols, per_word), rows), ("I32",), 0),
            Part("scales", (groups, rows), SCALES, 0),
            Part("qzeros", (groups, ceil_div(rows, per_word)), ("I32",), 0),
            Part("g_idx", (cols,), ("I32",), 0, optional=True),
        )

    def layout(self, dtype: str, cols: int) -> Quantised:
        """Integers with a scale per 128 columns, or fewer where groups are smaller."""
        check_divides(self.group, cols)
        group = device_group(self.group, cols)
        code = "int4" if self.bits == 4 else "int8"
        return Quantised(code, group, self._scale_bytes(dtype), not self.symmetric)  # type: ignore[arg-type]

    def decode(
        self, tensors: "Sequence[torch.Tensor]", rows: slice, cols: int, layout: Quantised
    ) -> "tuple[torch.Tensor, ...]":
        """The unpacked codes, scales, and zeros. Raises Malformed for an order of its own."""
        import torch

        words, scales, packed, order = tensors
        if len(order):
            in_order = torch.arange(cols, device=order.device) // (self.group or cols)
            if not torch.equal(order.long(), in_order):
                raise Malformed("g_idx has an activation order (desc_act), which is not supported")
        per_word = 32 // self.bits
        codes = unpacked(words[:, rows].t(), self.bits)[:, :cols]
        first = rows.start // per_word
        zeros = unpacked(packed[:, first : ceil_div(rows.stop, per_word)], self.bits).t()
        zeros = zeros[rows.start - first * per_word :][: len(codes)].short()
        zeros += 2 - self.version
        found = (codes, spread(scales[:, rows].t(), self.group, layout, cols))
        if not self.symmetric:
            return (*found, spread(zeros, self.group, layout, cols))
        if bool((zeros != 1 << (self.bits - 1)).any()):
            raise Malformed("qzeros are not half the range, though config.json says sym")
        return found
