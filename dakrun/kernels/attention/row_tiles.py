"""Prompt attention from the rows of a step, each with the newest tokens of a slot.

Steps with drafts use it, and decode steps where a KV head has more than MAX_GROUP_HEADS query
heads, up to 64: the heads are then the rows of a tile. Wraps native/row_tiles.cu. Knows rows and
slots, no models.
"""

import copy
import ctypes

import torch

from dakrun.geometry import (
    ATTENTION_PARTIAL_EXTRA,
    ELEMENTWISE_THREADS,
    KV_BLOCK,
    MAX_GROUP_HEADS,
    WARPGROUPS,
)
from dakrun.kernels.attention.kv_blocks import BlockTables, KVShape
from dakrun.kernels.attention.prompt import SPLIT_BLOCKS, SPLIT_ITEMS, PromptTile, PromptWork
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.units import ceil_div

SOURCE = "row_tiles.cu"


class _Args(ctypes.Structure):
    """RowTilesArgs of native/row_tiles.cu."""

    _fields_ = (
        *operands.pointers("lengths", "slots", "tables", "kv_addresses", "tiles"),
        *operands.fields(ctypes.c_int64, "layer_bytes", "head_bytes", "row_bytes"),
        *operands.ints("rows", "table_blocks", "width", "max_splits", "split_blocks"),
        *operands.ints("kv_heads", "group", "parts"),
    )


class RowTiles:
    """Room for the work of prompt attention of up to `rows` rows, of `width` tokens each.

    `kv_addresses`, int64 [rows * width, 3], says where store_kv() stores their keys and values.
    `tiles`, int32 [n, 12], are written on the device, so that each replay of a graph may do other
    work. A row has a tile for each of the ranges (splits) that its KV blocks may be divided into.
    With `alike` the most ranges are the same in every step, so that no bit of a row depends on the
    number of rows.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        shape: KVShape,
        group: int,
        device: torch.device,
        *,
        alike: bool = False,
    ) -> None:
        self.width, self.shape, self.group = width, shape, group
        self._alike = rows if alike else 0
        self.kv_addresses = torch.zeros(rows * width, 3, dtype=torch.int64, device=device)
        tiles = [0, *(n * self.splits(n) for n in range(1, rows + 1))]
        # Rows of partial results, of each head; none of tiles with a single range.
        split = max((n for rows, n in enumerate(tiles) if n > rows), default=0)
        partials = split * width * group * shape.kv_heads
        self.tiles = torch.zeros(
            max(tiles), len(PromptTile._fields), dtype=torch.int32, device=device
        )
        self._partials = torch.empty(
            partials * (shape.head_dim + ATTENTION_PARTIAL_EXTRA), device=device
        )
        self._arrivals = torch.zeros(
            rows * shape.kv_heads * WARPGROUPS, dtype=torch.int32, device=device
        )
        self._counts = torch.tensor(tiles, dtype=torch.int32, device=device)

    def of_width(self, width: int) -> "RowTiles":
        """The same buffers for rows of fewer tokens."""
        assert width <= self.width, f"expected up to {self.width} tokens of a row, got {width}"
        found = copy.copy(self)
        found.width = width
        return found

    def splits(self, rows: int) -> int:
        """The most ranges of KV blocks of a row, in a step of `rows` rows.

        The KV blocks of few rows are divided so that all SMs attend.
        """
        items = SPLIT_ITEMS // ((self._alike or rows) * self.shape.kv_heads)
        return max(1, min(items, self.shape.blocks // SPLIT_BLOCKS))

    def work(self, rows: int) -> PromptWork:
        """The work of prompt attention of the first `rows` rows."""
        return PromptWork(
            self.tiles, self._counts[rows : rows + 1], self._partials, self._arrivals,
            self.shape.kv_heads, self.group, rows=rows * self.width, slots=1,
            positions=self.shape.blocks * KV_BLOCK,
        )  # fmt: skip

    def assign(
        self,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        tables: BlockTables,
        *,
        pdl: bool = False,
    ) -> None:
        """Let the first rows, of one token, be of `slots`, int32 [n], with `lengths` positions.

        A row whose length is negative gets no tile. With `pdl` the launch may start before its
        predecessor ends. Raises ValueError if an operand has the wrong shape, dtype or device.
        """
        n, count = len(lengths), len(tables.addresses)
        operands.check_operands(
            lengths.device,
            {
                "lengths": (lengths, (n,), torch.int32),
                "slots": (slots, (n,), torch.int32),
                "tables": (tables.addresses, (count, tables.addresses.shape[1]), torch.int64),
            },
        )
        if self.width != 1 or n > len(self.kv_addresses):
            most = len(self.kv_addresses)
            raise ValueError(f"expected up to {most} rows of one token, got {n} of {self.width}")
        operands.check_gpu(lengths.device)
        args = _Args(
            lengths=lengths.data_ptr(),
            slots=slots.data_ptr(),
            tables=tables.addresses.data_ptr(),
            kv_addresses=self.kv_addresses.data_ptr(),
            tiles=self.tiles.data_ptr(),
            layer_bytes=tables.layer_bytes,
            head_bytes=tables.head_bytes,
            row_bytes=self.shape.layout.row_bytes,
            rows=n,
            table_blocks=tables.addresses.shape[1],
            width=self.width,
            max_splits=self.splits(n),
            split_blocks=SPLIT_BLOCKS,
            kv_heads=self.shape.kv_heads,
            group=self.group,
            parts=WARPGROUPS,
        )
        kernel = jit.kernel(SOURCE, "row_tiles", {})
        kernel.launch(ceil_div(32 * n, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, args, pdl=pdl)


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [{}] if needs.group > MAX_GROUP_HEADS or needs.every else []
