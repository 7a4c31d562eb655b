"""FP8: e4m3 elements as stored, with scales per tensor, per row, or per block of rows and columns.

DeepSeek and Qwen store `weight_scale_inv` per 128 x 128 block, which multiplies in spite of its
name; compressed-tensors, ModelOpt and FBGEMM store `weight_scale`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dakrun.formats.device_layout import Quantised
from dakrun.formats.stored import SCALES, Part, Stored, device_group, spread
from dakrun.units import ceil_div

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fp8(Stored):
    """e4m3 elements with a scale for each block of `block` rows and columns; 0 stands for all."""

    block: tuple[int, int] = (0, 0)
    scale: str = "weight_scale"

    @property
    def name(self) -> str:
        """What people call it."""
        per = {(0, 0): "tensor", (1, 0): "row"}.get(self.block, "{}x{} block".format(*self.block))
        return f"FP8, a scale per {per}"

    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """The elements [M, K] and a scale for each block; blocks at the edges may be smaller."""
        high, wide = self.block
        shape = (ceil_div(rows, high) if high else 1, ceil_div(cols, wide) if wide else 1)
        return (
            Part("weight", (rows, cols), ("F8_E4M3",)),
            Part(self.scale, shape, SCALES, high),
        )

    def layout(self, dtype: str, cols: int) -> Quantised:
        """e4m3 with a scale per 128 columns, or fewer where blocks are narrower."""
        group = device_group(self.block[1], cols)
        return Quantised("e4m3", group, self._scale_bytes(dtype))

    def decode(
        self, tensors: "Sequence[torch.Tensor]", rows: slice, cols: int, layout: Quantised
    ) -> "tuple[torch.Tensor, ...]":
        """The codes as they are, and the scales of their blocks."""
        import torch

        weight, scales = tensors
        high, wide = self.block
        if high:
            row = torch.arange(rows.start, rows.stop, device=scales.device) // high
            scales = scales[row - rows.start // high]
        else:
            scales = scales.expand(rows.stop - rows.start, -1)
        return weight.view(torch.uint8), spread(scales, wide, layout, cols)
