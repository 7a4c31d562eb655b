"""How a checkpoint stores the weight of a module: its tensors, and how they become device elements.

A file for each format says what its tensors are. All of them become codes, scales and zeros of
device_layout.py, with the values that they have in the checkpoint. Knows neither files nor models.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dakrun.formats.device_layout import GROUPS, Quantised
from dakrun.units import ceil_div

if TYPE_CHECKING:
    import torch

# Dtypes of scales by safetensors' names.
SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
SCALES = tuple(SCALE_DTYPES)


@dataclass(frozen=True)
class Part:
    """One of the tensors that store a weight [M, K]: module name and `suffix`, `shape`, `dtypes`.

    Files may add or leave out dimensions of 1. A row of the tensor is for `rows` rows of the
    weight; with 0 any row of the weight needs the whole tensor. An `optional` tensor may be
    missing; it is then read as an empty one.
    """

    suffix: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows: int = 1
    optional: bool = False

    def needed(self, rows: slice) -> slice | None:
        """The tensor's rows for `rows` of the weight; None for the whole tensor."""
        return slice(rows.start // self.rows, ceil_div(rows.stop, self.rows)) if self.rows else None


class Malformed(ValueError):
    """Contents of a tensor that its format does not allow."""


@dataclass(frozen=True)
class Stored(ABC):
    """A format of a checkpoint's weights; `scale_dtype` is that of the scales, as torch names it.

    `by_columns`: the tensors have K first, so that any rows of the weight need all of them.
    """

    scale_dtype: str = "float32"
    by_columns: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it, with its groups, such as "4-bit AWQ, groups of 128"."""

    @abstractmethod
    def parts(self, rows: int, cols: int) -> tuple[Part, ...]:
        """The tensors of a weight [rows, cols]."""

    @abstractmethod
    def layout(self, dtype: str, cols: int) -> Quantised:
        """The layout on the device of a weight with `cols` columns, for products in `dtype`.

        Raises ValueError, with a message for users, if a weight cannot have so many columns.
        """

    @abstractmethod
    def decode(
        self, tensors: "Sequence[torch.Tensor]", rows: slice, cols: int, layout: Quantised
    ) -> "tuple[torch.Tensor, ...]":
        """The elements of `rows` of the weight as `layout.write` takes them.

        `tensors` are the parts, of which the rows `needed` alone. Raises Malformed.
        """

    def _scale_bytes(self, dtype: str) -> int:
        """2 where scales have the products' 16-bit dtype, else 4: both keep their values."""
        return 2 if self.scale_dtype == dtype != "float32" else 4


def device_group(group: int, cols: int) -> int:
    """Columns that share a scale on the device, where `group` share it in a checkpoint (0: all).

    The largest group of the layout that divides both, or `group` alone if none divides `cols`.
    Raises ValueError if no group of the layout divides `group`.
    """
    fits = [size for size in GROUPS if group % size == 0]
    if not fits:
        raise ValueError(f"groups of {group} columns are not multiples of {GROUPS[0]}")
    return max((size for size in fits if cols % size == 0), default=fits[-1])


def check_divides(group: int, cols: int) -> None:
    """Raise ValueError unless groups of `group` columns (0: all) divide `cols` evenly."""
    if group and cols % group:
        raise ValueError(f"groups of {group} do not divide its {cols} columns")


def spread(scales: "torch.Tensor", group: int, layout: Quantised, cols: int) -> "torch.Tensor":
    """Scales or zeros [R, groups] of `group` columns (0: all) as those of the layout's groups."""
    count = ceil_div(cols, layout.group)
    if not group:
        return scales.expand(-1, count)
    return scales.repeat_interleave(group // layout.group, 1)[:, :count]


def unpacked(words: "torch.Tensor", bits: int, order: Sequence[int] = ()) -> "torch.Tensor":
    """Integers of 4 or 8 `bits` in int32 words [..., n], lowest first: uint8 [..., 32 n / bits].

    With `order` the i-th bits of a word are element order[i].
    """
    import torch

    as_bytes = words.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    as_bytes = as_bytes.view(*words.shape[:-1], -1)
    every = as_bytes
    if bits == 4:
        every = torch.stack((as_bytes & 15, as_bytes >> 4), -1).flatten(-2)
    if order:
        indices = [order.index(element) for element in range(len(order))]
        every = every.unflatten(-1, (-1, len(order)))[..., indices].flatten(-2)
    return every
