"""KV blocks: the packed form of keys and values, which the attention kernels read.

A block has 64 positions of one layer. The part of a KV head is [keys, values][64 positions]
[head_dim] of 16-bit elements; its filled keys or values are contiguous. Within a position, chunks
of 8 dimensions are swizzled, so that the equal chunks of 8 positions that a matrix load reads lie
in different banks of shared memory. Blocks may lie anywhere (BlockTables). A packed slot is one
piece of memory, [KV heads][blocks][keys, values][64][head_dim].
"""

import functools
import math
from dataclasses import dataclass

import torch

from dakrun.formats import KVLayout
from dakrun.geometry import CHUNK, HEAD_DIMS, KV_BLOCK
from dakrun.kernels.runtime.operands import DTYPES
from dakrun.units import ceil_div


@dataclass(frozen=True)
class KVShape:
    """Capacity of a slot: `positions`, rounded up to whole blocks, of `kv_heads` of `head_dim`."""

    kv_heads: int
    head_dim: int
    positions: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS or self.kv_heads < 1 or self.positions < 1:
            raise ValueError(
                f"expected head_dim in {HEAD_DIMS}, positive kv_heads and positions, got {self}"
            )

    @functools.cached_property
    def layout(self) -> KVLayout:
        """The layout's bytes: elements have 16 bits."""
        return KVLayout(self.kv_heads, self.head_dim, element_bytes=2)

    @property
    def blocks(self) -> int:
        """Blocks of each KV head."""
        return ceil_div(self.positions, KV_BLOCK)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's block: keys and values."""
        return self.layer_bytes // self.kv_heads

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer: keys and values of all heads."""
        return self.layout.block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: keys and values of all heads."""
        return self.blocks * self.layer_bytes


@dataclass(frozen=True)
class BlockTables:
    """Where the KV blocks of slots lie: block tables on the device.

    KV head h of block b of table t begins, in layer i, at the address
    addresses[t, b] + i * layer_bytes + h * head_bytes. `addresses` is int64 [tables, blocks].
    """

    addresses: torch.Tensor
    head_bytes: int
    layer_bytes: int = 0

    @classmethod
    def of_slots(
        cls, starts: torch.Tensor, shape: KVShape, *, layer_bytes: int = 0
    ) -> "BlockTables":
        """Tables of packed slots that begin at `starts`, int64 [slots]."""
        blocks = torch.arange(shape.blocks, device=starts.device) * shape.head_bytes
        head_bytes = shape.blocks * shape.head_bytes
        return cls(starts[:, None] + blocks, head_bytes, layer_bytes)


def pack(keys: torch.Tensor, values: torch.Tensor, shape: KVShape) -> torch.Tensor:
    """Pack keys and values [Hkv, P, D], 16-bit, into a slot's bytes (uint8, 1-D).

    Positions from P on are zero. Raises ValueError if they do not fit `shape`.
    """
    if keys.shape != values.shape or keys.dtype not in DTYPES or keys.dtype != values.dtype:
        raise ValueError(
            f"expected keys and values of one shape in 16 bits, got {list(keys.shape)} of "
            f"{keys.dtype} and {list(values.shape)} of {values.dtype}"
        )
    heads, positions, dim = keys.shape
    room = shape.blocks * KV_BLOCK
    if (heads, dim) != (shape.kv_heads, shape.head_dim) or positions > room:
        raise ValueError(f"expected keys that fit {shape}, got {list(keys.shape)}")
    both = torch.nn.functional.pad(torch.stack((keys, values), 1), (0, 0, 0, room - positions))
    blocks = _swizzled(both, 0).view(heads, 2, shape.blocks, KV_BLOCK, dim)
    return blocks.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def unpack(
    slot: torch.Tensor, dtype: torch.dtype, shape: KVShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack keys and values [Hkv, positions, D] from a slot's bytes."""
    return read(slot, shape.positions, dtype, shape)


def append(
    slot: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: int, shape: KVShape
) -> None:
    """Write the key and value [Hkv, D] of one position into a slot's bytes."""
    write(slot, key[:, None], value[:, None], position, shape)


def write(
    slot: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, shape: KVShape
) -> None:
    """Write keys and values [Hkv, P, D] at positions `start` to start + P - 1 of a slot's bytes."""
    blocks = _blocks(slot, keys.dtype, shape)
    count = keys.shape[1]
    if start < 0 or start + count > shape.blocks * KV_BLOCK:
        raise ValueError(f"expected positions of {shape}, got {start} to {start + count}")
    both = _swizzled(torch.stack((keys, values), 1), start)
    done = 0
    while done < count:  # the rest of a block, then whole blocks, then the start of a block
        block, row = divmod(start + done, KV_BLOCK)
        whole = (count - done) // KV_BLOCK if row == 0 else 0
        taken = whole * KV_BLOCK or min(KV_BLOCK - row, count - done)
        some = both[:, :, done : done + taken].unflatten(2, (max(1, whole), -1))
        target = blocks[:, block : block + max(1, whole), :, row : row + some.shape[3]]
        target.copy_(some.transpose(1, 2))
        done += taken


def read(
    slot: torch.Tensor, count: int, dtype: torch.dtype, shape: KVShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values [Hkv, count, D] of the first `count` positions from a slot's bytes."""
    used = _blocks(slot, dtype, shape)[:, : ceil_div(count, KV_BLOCK)].permute(2, 0, 1, 3, 4)
    keys, values = _swizzled(used.flatten(2, 3)[:, :, :count], 0)
    return keys, values


def read_blocks(
    blocks: torch.Tensor, count: int, dtype: torch.dtype, shape: KVShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values [Hkv, count, D] of the first positions of blocks [n, layer_bytes]."""
    parts = blocks.view(dtype).view(-1, shape.kv_heads, 2, KV_BLOCK, shape.head_dim)
    keys, values = _swizzled(parts.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :count], 0)
    return keys, values


def _blocks(slot: torch.Tensor, dtype: torch.dtype, shape: KVShape) -> torch.Tensor:
    """A slot's bytes as [Hkv, blocks, keys and values, 64, D]."""
    if slot.dtype != torch.uint8 or slot.shape != (shape.slot_bytes,):
        raise ValueError(f"expected {shape.slot_bytes} bytes, got {list(slot.shape)}")
    return slot.view(dtype).view(shape.kv_heads, shape.blocks, 2, KV_BLOCK, shape.head_dim)


def _swizzled(x: torch.Tensor, start: int) -> torch.Tensor:
    """Swizzle, or unswizzle, rows [..., P, D] of the positions from `start` on.

    Chunk c of position p and chunk c ^ (p % 8 * s // 8) are exchanged, where s is the largest of
    2, 4 and 8 that divides the number of chunks.
    """
    count, dim = x.shape[-2:]
    swizzle = math.gcd(dim // CHUNK, 8)
    positions = torch.arange(count, device=x.device)[:, None]
    chunks = torch.arange(dim // CHUNK, device=x.device)
    swizzled = chunks ^ (positions + start) % 8 * swizzle // 8
    return x.unflatten(-1, (-1, CHUNK))[..., positions, swizzled, :].flatten(-2)
