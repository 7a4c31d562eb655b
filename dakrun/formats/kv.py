"""The layout of keys and values in the KV cache: its bytes, and whether kernels read it.

The cache itself knows bytes only. kernels/attention/kv_blocks.py has the order of the elements in a
block for the GPU's kernels, engine/kv_layout.py for plain torch.
"""

from dataclasses import dataclass

from dakrun.geometry import HEAD_DIMS, KV_BLOCK, PROMPT_PART_ROWS


@dataclass(frozen=True)
class KVLayout:
    """Keys and values of `kv_heads` of `head_dim` elements, in one layer.

    An element has `element_bytes`. A KV block, which has KV_BLOCK positions, lies in one tier.
    """

    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, or a value, of one head and position."""
        return self.head_dim * self.element_bytes

    @property
    def position_bytes(self) -> int:
        """Bytes of a position: keys and values of all heads."""
        return 2 * self.kv_heads * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return KV_BLOCK * self.position_bytes

    def has_kernels(self, q_heads: int) -> bool:
        """Whether the attention kernels read this layout, for a model of `q_heads` query heads."""
        group = q_heads // self.kv_heads
        return self.element_bytes == 2 and self.head_dim in HEAD_DIMS and group <= PROMPT_PART_ROWS
