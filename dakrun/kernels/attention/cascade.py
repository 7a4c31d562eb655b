"""Attention of decode rows to the prefixes that they share: each is read once for all its rows.

A cascade (as in Hydragen, arXiv 2402.05099): prompt attention's kernel attends from the rows of a
step to the KV blocks that they share, and SplitK_FlashAttn goes on from these partial results over
each row's own blocks. What is shared lies in buffers on the device, so that a graph's launches may
do other work. Knows rows and addresses of blocks, neither slots nor requests.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dakrun.geometry import ATTENTION_PARTIAL_EXTRA, KV_BLOCK, PROMPT_PART_ROWS, WARPGROUPS
from dakrun.kernels.attention.copy_blocks import copy_blocks
from dakrun.kernels.attention.kv_blocks import KVShape
from dakrun.kernels.attention.prompt import (
    SPLIT_BLOCKS,
    SPLIT_ITEMS,
    PromptArgs,
    PromptTile,
    launch_prompt_attn,
    part_queries,
)
from dakrun.memory.device import upload
from dakrun.units import ceil_div

COPY_BYTES = 32 << 20  # of HBM at most, for one layer of shared blocks in remote tiers
HEADER = 4  # integers before the buffers' contents: the number of tiles


class RowGroup(NamedTuple):
    """Rows `first` to `first + rows` - 1, which share the KV blocks at `addresses` (of layer 0).

    Blocks of a `remote` tier are copied to HBM first, layer by layer: its memory is not cached, and
    several CTAs read them.
    """

    first: int
    rows: int
    addresses: Sequence[int]
    remote: bool


class PrefixAttention:
    """Attention of up to `rows` rows of a step to shared prefixes.

    `blocks`, int32 [rows], says how many leading KV blocks of each row are in a prefix, and
    `results`, float32 [rows, Hq, D + 4], has the attention to them after a launch: unnormalized
    outputs, the maximum score (times log2(e)), the sum of exponentials, and padding. Rows of
    results without a prefix are meaningless. `copies` is the number of blocks, of one layer, that
    there is room for to copy them from remote tiers, `capacity` that of addresses.
    """

    def __init__(
        self, rows: int, shape: KVShape, group: int, device: torch.device, *, remote: bool
    ) -> None:
        """For slots of `shape` with `group` query heads per KV head; no row has a prefix yet.

        Room for copies is only there if slots may be in a `remote` tier.
        """
        self._shape, self._group = shape, group
        self._rows = ceil_div(rows, HEADER) * HEADER  # so that tiles are aligned
        width = shape.head_dim + ATTENTION_PARTIAL_EXTRA
        tiles = max(rows, SPLIT_ITEMS)
        integers = HEADER + self._rows + tiles * len(PromptTile._fields)
        self._integers = torch.zeros(integers, dtype=torch.int32, device=device)
        self.blocks = self._integers[HEADER : HEADER + rows]
        self._tiles = self._integers[HEADER + self._rows :].view(tiles, -1)
        self.results = torch.zeros(
            rows, group * shape.kv_heads, width, dtype=torch.float32, device=device
        )
        self.capacity = 4 * max(shape.blocks, rows)
        self.copies = min(self.capacity, COPY_BYTES // shape.layer_bytes) if remote else 0
        self._copied = torch.empty(self.copies, shape.layer_bytes, dtype=torch.uint8, device=device)
        # The number of blocks to copy, their addresses, then those of the groups' blocks.
        self._addresses = torch.zeros(
            1 + self.copies + self.capacity, dtype=torch.int64, device=device
        )
        room = SPLIT_ITEMS * WARPGROUPS * PROMPT_PART_ROWS * width
        self._partials = torch.empty(room, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(SPLIT_ITEMS * WARPGROUPS, dtype=torch.int32, device=device)

    def assign(self, groups: Sequence[RowGroup]) -> None:
        """Let later launches attend from the rows of `groups`, which follow each other.

        Groups for which there is no room, in `capacity` and `copies`, are left out: their rows have
        no prefix.
        """
        shape = self._shape
        blocks = [0] * self._rows
        sources: list[int] = []
        addresses: list[int] = []
        taken: list[tuple[RowGroup, int]] = []  # and the index of its addresses
        for group in groups:
            count = len(group.addresses)
            copied = count if group.remote else 0
            if count > self.capacity - len(addresses) or copied > self.copies - len(sources):
                continue
            taken.append((group, len(addresses)))
            blocks[group.first : group.first + group.rows] = [count] * group.rows
            if group.remote:
                start = self._copied.data_ptr() + len(sources) * shape.layer_bytes
                # Bit 0: the block has one layer only.
                addresses += [start + i * shape.layer_bytes + 1 for i in range(count)]
                sources += group.addresses
            else:
                addresses += group.addresses
        tiles = _tiles(taken, shape.kv_heads, self._group)
        device = self._integers.device
        numbers = [len(tiles), *[0] * (HEADER - 1), *blocks, *(n for tile in tiles for n in tile)]
        integers = upload(torch.tensor(numbers, dtype=torch.int32), device)
        self._integers[: len(numbers)].copy_(integers)
        numbers = [len(sources), *sources, *[0] * (self.copies - len(sources)), *addresses]
        self._addresses[: len(numbers)].copy_(
            upload(torch.tensor(numbers, dtype=torch.int64), device)
        )

    def launch(
        self,
        q: torch.Tensor,
        lengths: torch.Tensor,
        *,
        scale: float,
        layer: int,
        rotations: torch.Tensor | None = None,
        layer_bytes: int | None = None,
        head_bytes: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Compute the results of `layer` for the groups' rows of q [n, Hq, D].

        Operands are as for splitk_flash_attn(): q before its rotation to the positions `lengths`,
        int32 [n]. Blocks of layers lie `layer_bytes` apart, and those of KV heads `head_bytes`; by
        default as in kv_blocks.py.
        """
        shape = self._shape
        layer_bytes = shape.layer_bytes if layer_bytes is None else layer_bytes
        if self.copies:
            copy_blocks(
                self._addresses[:1], self._addresses[1 : 1 + self.copies], self._copied,
                layer_offset=layer * layer_bytes, pdl=pdl,
            )  # fmt: skip
        args = PromptArgs(
            tiles=self._tiles.data_ptr(),
            count=self._integers.data_ptr(),
            q=q.data_ptr(),
            tables=self._addresses[1 + self.copies :].data_ptr(),
            partials=self._partials.data_ptr(),
            arrivals=self._arrivals.data_ptr(),
            stride=q.stride(0),
            layer_offset=layer * layer_bytes,
            head_bytes=shape.head_bytes if head_bytes is None else head_bytes,
            table_blocks=1,  # a tile's `slot` is the index of its first address
            kv_heads=shape.kv_heads,
            group=self._group,
            lengths=lengths.data_ptr(),
            rotations=0 if rotations is None else rotations.data_ptr(),
            results=self.results.data_ptr(),
        )
        launch_prompt_attn(args, q, scale, prefixes=True, pdl=pdl)


def _tiles(groups: Sequence[tuple[RowGroup, int]], kv_heads: int, heads: int) -> list[PromptTile]:
    """Tiles of the groups' rows, for `heads` query heads of each KV head.

    Where they are fewer than SMs, KV blocks are divided into splits.
    """
    step = WARPGROUPS * part_queries(heads)
    items = sum(ceil_div(group.rows, step) for group, _ in groups) * kv_heads
    tiles: list[PromptTile] = []
    partials = arrivals = 0
    for group, index in groups:
        blocks = len(group.addresses)
        splits = max(1, min(blocks // SPLIT_BLOCKS, SPLIT_ITEMS // items))
        for first in range(0, group.rows, step):
            rows = min(step, group.rows - first)
            for split in range(splits):
                start, end = (i * blocks // splits for i in (split, split + 1))
                tiles.append(
                    PromptTile(
                        group.first + first, rows, position=blocks * KV_BLOCK,
                        length=blocks * KV_BLOCK, slot=index, first_block=start,
                        blocks=end - start, split=split, splits=splits, partial=partials,
                        arrivals=arrivals,
                    )
                )  # fmt: skip
            if splits > 1:
                partials += splits * rows * heads
                arrivals += kv_heads * WARPGROUPS
    return sorted(tiles, key=lambda tile: -tile.blocks)
