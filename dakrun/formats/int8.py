"""compressed-tensors' `int-quantized`: signed integers of 8 bits, a scale per row or tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dakrun.formats.device_layout import Quantised
from dakrun.formats.stored import SCALES, Part, Stored, check_divides, device_group, spread

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Int8(Stored):
    """Elements of 8 bits with scales, and zeros if it has them.

    A scale is for `group` columns (0: all) of a row, or of all rows if not `per_row`.
    """

    group: int = 0
    per_row: bool = True
    zeros: bool = False

    @property
    def name(self) -> str:
        """What people call it."""
        per = "row" if self.per_row else "tensor"
        per = f"{self.group} columns" if self.group else per
        return f"INT8, a scale per {per}{' with zeros' if self.zeros else ''}"

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """Elements, scales, and zeros if there are any."""
        shape = (rows if self.per_row else 1, cols // self.group if self.group else 1)
        every = int(self.per_row)
        found = (Part("weight", (rows, cols), ("I8",)), Part("weight_scale", shape, SCALES, every))
        zeros = Part("weight_zero_point", shape, ("I8",), every)
        return (*found, zeros) if self.zeros else found

    def layout(self, dtype: str, cols: int) -> Quantised:
        """Integers of 8 bits with a scale per 128 columns."""
        check_divides(self.group, cols)
        return Quantised(
            "int8", device_group(self.group, cols), self._scale_bytes(dtype), self.zeros
        )

    def decode(
        self, tensors: "Sequence[torch.Tensor]", rows: slice, cols: int, layout: Quantised
    ) -> "tuple[torch.Tensor, ...]":
        """Codes and zeros with 128 added, and scales."""
        import torch

        weight, *more = tensors
        more = [spread(each.expand(len(weight), -1), self.group, layout, cols) for each in more]
        codes = weight.view(torch.uint8) ^ 128
        return (codes, more[0], *(zeros.short() + 128 for zeros in more[1:]))
