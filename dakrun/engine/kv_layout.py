"""What the KV cache asks of a layout of keys and values in a block, and the layout of plain torch.

That of the GPU's kernels is KVShape (kernels/attention).
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from dakrun.formats import KVLayout
from dakrun.geometry import KV_BLOCK
from dakrun.units import ceil_div


class SlotLayout(Protocol):
    """What the cache knows of a layout of keys and values."""

    @property
    def blocks(self) -> int:
        """Blocks of a full slot."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer."""
        ...

    @property
    def head_bytes(self) -> int | None:
        """Bytes from head to head of a block that kernels find by block tables; None: no tables."""
        ...


@dataclass(frozen=True)
class RowLayout:
    """A block of one layer as keys, then values, [64 positions, Hkv, D] of any dtype.

    `positions` is the capacity of a slot.
    """

    kv_heads: int
    head_dim: int
    positions: int
    dtype: torch.dtype
    head_bytes: ClassVar[None] = None

    @property
    def blocks(self) -> int:
        """Blocks of a full slot."""
        return ceil_div(self.positions, KV_BLOCK)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return KVLayout(self.kv_heads, self.head_dim, self.dtype.itemsize).block_bytes

    def view(self, blocks: torch.Tensor) -> torch.Tensor:
        """Keys and values [..., 2, 64, Hkv, D] of the bytes [..., layer_bytes] of blocks."""
        return blocks.view(self.dtype).unflatten(-1, (2, KV_BLOCK, self.kv_heads, self.head_dim))
