"""Codes of 4 or 8 bits row after row, with their scales: the format of plain torch.

Kernels read the same elements in the units of device_layout.py. Two codes of 4 bits share a byte: a
column of the row's first half, and the same column of its second half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dakrun.formats.device_layout import Quantised, decoded
from dakrun.formats.split import Split
from dakrun.formats.weight_format import Array, WeightFormat
from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.units import ceil_div

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuantisedRows(WeightFormat):
    """The elements of `layout`, in arrays of codes, scales, and zeros or factors if it has them."""

    layout: Quantised
    for_kernels = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the layout."""
        return self.layout.name

    @property
    def packed(self) -> WeightFormat:
        """The layout."""
        return self.layout

    def arrays(self, cols: int) -> tuple[Array, ...]:
        """An array for each kind of number."""
        layout, groups = self.layout, ceil_div(cols, self.layout.group)
        sizes = {"codes": ceil_div(cols * layout.bits, 8), "scales": groups * layout.scale_bytes}
        if layout.zeros:
            sizes["zeros"] = 2 * groups
        if layout.scale_bytes == 1:
            sizes["factors"] = 4
        return tuple(
            Array(name, ROWS_PER_BLOCK * size, 4, padded=False) for name, size in sizes.items()
        )

    def takes(self, cols: int) -> bool:
        """Any matrix."""
        return True

    def write(
        self, arrays: "Sequence[torch.Tensor]", split: Split, first: int, *stored: "torch.Tensor"
    ) -> None:
        """Store what `layout.write` takes: codes, scales, and zeros or factors."""
        import torch

        codes, scales, *more = stored
        if self.layout.bits == 4:
            half = ceil_div(codes.shape[1], 2)
            low, high = codes[:, :half], codes[:, half:]
            codes = low.clone()
            codes[:, : high.shape[1]] |= high << 4
        if self.layout.scale_bytes == 4:
            scales = scales.float()
        if self.layout.zeros:
            more = [more[0].to(torch.int16)]
        elif self.layout.scale_bytes == 1:
            more = [more[0].float()[:, None]]
        for array, rows in zip(arrays, (codes, scales, *more), strict=True):
            as_bytes = rows.contiguous().view(torch.uint8).view(len(codes), -1)
            top = ROWS_PER_BLOCK * first
            array.view(-1, as_bytes.shape[1])[top : top + len(codes)] = as_bytes

    def read(
        self, arrays: "Sequence[torch.Tensor]", split: Split, cols: int, dtype: "torch.dtype"
    ) -> "torch.Tensor":
        """The rows [R, K] in `dtype`."""
        import torch

        layout, groups = self.layout, ceil_div(cols, self.layout.group)
        if not split.row_blocks:
            return arrays[0].new_empty((0, cols), dtype=dtype)
        codes = arrays[0].view(-1, ceil_div(cols * layout.bits, 8))
        if layout.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), 1)[:, :cols]
        scale_dtype = {1: torch.float8_e4m3fn, 2: dtype, 4: torch.float32}[layout.scale_bytes]
        scales = arrays[1].view(scale_dtype).view(-1, groups)
        more = [array.view(torch.int16).view(-1, groups) for array in arrays[2:] if layout.zeros]
        if layout.scale_bytes == 1:
            more = [arrays[2].view(torch.float32)]
        return dense(layout, dtype, codes, scales, *more)


def dense(
    layout: Quantised,
    dtype: "torch.dtype",
    codes: "torch.Tensor",
    scales: "torch.Tensor",
    more: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """The elements [R, K] in `dtype` of what `layout.write` takes, for products in `dtype`."""
    scales = scales.float()
    if layout.scale_bytes == 1 and more is not None:
        scales = scales * more.float()[:, None]
    values, cols = decoded(codes, layout.code), codes.shape[1]
    if cols % layout.group:  # the last group has fewer columns
        values = values.new_zeros(len(codes), scales.shape[1] * layout.group)
        values[:, :cols] = decoded(codes, layout.code)
    grouped = values.view(len(codes), -1, layout.group)
    if layout.code.startswith("int"):
        grouped -= 1 << (layout.bits - 1) if more is None else more[:, :, None].float()
    grouped *= scales[:, :, None]
    return values[:, :cols].to(dtype)
