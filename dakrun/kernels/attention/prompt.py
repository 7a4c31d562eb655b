"""Prompt attention: several queries per request over KV blocks; wraps native/prompt_attn.cu.

Knows operands and how queries are divided into tiles, no models and no plans.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dakrun.geometry import (
    ATTENTION_PARTIAL_EXTRA,
    HEAD_DIMS,
    KV_BLOCK,
    MAX_GROUP_HEADS,
    PROMPT_MAX_STAGES,
    PROMPT_PART_ROWS,
    PROMPT_THREADS,
    WARPGROUPS,
)
from dakrun.hardware import Card
from dakrun.kernels.attention.kv_blocks import BlockTables
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.card import card_of
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.memory.device import upload
from dakrun.units import ceil_div

SOURCE = "prompt_attn.cu"
SPLIT_BLOCKS = 16  # KV blocks of a split at least: shorter ones cost more to combine
SPLIT_ITEMS = 128  # items that the splits of one request are to make: about one per SM
PANEL_COLS = 64  # columns of a panel in shared memory: 128 bytes


class PromptSegment(NamedTuple):
    """Queries of a request: `length` rows of q from `row` on.

    They are at positions `start`, start + 1, ... of slot `slot`.
    """

    row: int
    slot: int
    start: int
    length: int


class PromptTile(NamedTuple):
    """PromptTile of native/prompt_attn.cuh."""

    row: int
    queries: int
    position: int
    length: int
    slot: int
    first_block: int
    blocks: int
    split: int
    splits: int
    partial: int
    arrivals: int
    unused: int = 0


class PromptArgs(ctypes.Structure):
    """PromptAttnArgs of native/prompt_attn.cuh."""

    _fields_ = (
        *operands.pointers("tiles", "count", "q", "tables", "out", "partials", "arrivals"),
        *operands.fields(ctypes.c_int64, "stride", "layer_offset", "head_bytes"),
        *operands.ints("table_blocks", "kv_heads", "group", "part_queries", "ctas"),
        ("scale", ctypes.c_float),
        *operands.pointers("lengths", "rotations", "results"),
    )


@dataclass(frozen=True)
class PromptWork:
    """The work of a pass, the same for all layers: tiles of queries, and room for partial results.

    `tiles`, int32 [n, 12], and their number `count`, int32 [1], are on the device; `partials` is
    float32, `arrivals` int32 and zero between launches. `rows`, `slots` and `positions` are those
    that the tiles use at least. Launches with it must follow each other on one stream.
    """

    tiles: torch.Tensor
    count: torch.Tensor
    partials: torch.Tensor
    arrivals: torch.Tensor
    kv_heads: int
    group: int
    rows: int
    slots: int
    positions: int

    @classmethod
    def of(
        cls,
        segments: Sequence[PromptSegment],
        *,
        kv_heads: int,
        group: int,
        head_dim: int,
        device: torch.device,
    ) -> "PromptWork":
        """Divide `segments` into tiles, for `group` query heads of each KV head.

        Raises ValueError for a segment without queries, or sizes that the kernel does not take.
        """
        if any(min(s) < 0 or s.length < 1 for s in segments) or not segments:
            raise ValueError(f"expected segments with a query or more, got {list(segments)}")
        if not 1 <= group <= PROMPT_PART_ROWS or kv_heads < 1 or head_dim not in HEAD_DIMS:
            raise ValueError(
                f"expected 1 to {PROMPT_PART_ROWS} query heads per KV head and head_dim in "
                f"{HEAD_DIMS}, got {group} and {head_dim}"
            )
        tiles: list[PromptTile] = []
        partials = arrivals = 0
        for s in segments:
            for tile in _tiles(s, kv_heads, group):
                tiles += (
                    tile._replace(
                        first_block=split * tile.blocks // tile.splits,
                        blocks=(split + 1) * tile.blocks // tile.splits
                        - split * tile.blocks // tile.splits,
                        split=split,
                        partial=partials,
                        arrivals=arrivals,
                    )
                    for split in range(tile.splits)
                )
                if tile.splits > 1:
                    partials += tile.splits * tile.queries * group
                    arrivals += kv_heads * WARPGROUPS
        tiles.sort(key=lambda tile: -tile.blocks)
        width = kv_heads * (head_dim + ATTENTION_PARTIAL_EXTRA)
        return cls(
            upload(torch.tensor(tiles, dtype=torch.int32), device),
            upload(torch.tensor([len(tiles)], dtype=torch.int32), device),
            torch.empty(partials * width, dtype=torch.float32, device=device),
            torch.zeros(arrivals, dtype=torch.int32, device=device),
            kv_heads,
            group,
            rows=max(s.row + s.length for s in segments),
            slots=max(s.slot for s in segments) + 1,
            positions=max(s.start + s.length for s in segments),
        )


def _tiles(segment: PromptSegment, kv_heads: int, group: int) -> Iterator[PromptTile]:
    """Tiles of a segment, not yet divided into splits.

    Where its tiles are fewer than SMs, KV blocks are divided into splits. Their number depends on
    the segment alone, so that other requests change no bit of its outputs.
    """
    step = WARPGROUPS * part_queries(group)
    items = ceil_div(segment.length, step) * kv_heads
    for first in range(0, segment.length, step):
        queries = min(step, segment.length - first)
        blocks = ceil_div(segment.start + first + queries, KV_BLOCK)
        yield PromptTile(
            segment.row + first,
            queries,
            segment.start + first,
            segment.start + segment.length,
            segment.slot,
            first_block=0,
            blocks=blocks,
            split=0,
            splits=max(1, min(blocks // SPLIT_BLOCKS, SPLIT_ITEMS // items)),
            partial=0,
            arrivals=0,
        )


def prompt_attn(
    q: torch.Tensor,
    tables: BlockTables,
    work: PromptWork,
    out: torch.Tensor,
    *,
    scale: float,
    layer: int = 0,
    pdl: bool = False,
) -> torch.Tensor:
    """out [T, Hq * D] = causal attention of the queries of `work` to their requests' positions.

    q is [T, Hq, D] of a 16-bit dtype, with contiguous rows. A query sees the positions up to its
    own. All of these, the queries' own included, have keys and values in KV blocks of the `layer`
    (layout: kv_blocks.py), which lie anywhere that the GPU reads; slots are numbers of `tables`.
    Scores are q k^T times `scale`. Rows of `out` that no segment has stay as they are. With `pdl`
    the launch may start before its predecessor ends.
    Raises ValueError if an operand has the wrong shape, dtype, device or strides.
    """
    _check_operands(q, tables, work, out)
    operands.check_gpu(q.device)
    args = PromptArgs(
        tiles=work.tiles.data_ptr(),
        count=work.count.data_ptr(),
        q=q.data_ptr(),
        tables=tables.addresses.data_ptr(),
        out=out.data_ptr(),
        partials=work.partials.data_ptr(),
        arrivals=work.arrivals.data_ptr(),
        stride=q.stride(0),
        layer_offset=layer * tables.layer_bytes,
        head_bytes=tables.head_bytes,
        table_blocks=tables.addresses.shape[1],
        kv_heads=work.kv_heads,
        group=work.group,
    )
    launch_prompt_attn(args, q, scale, pdl=pdl)
    return out


def launch_prompt_attn(
    args: PromptArgs, q: torch.Tensor, scale: float, *, prefixes: bool = False, pdl: bool = False
) -> None:
    """Launch the kernel, or its variant for `prefixes`, with checked operands.

    Fills in what `args` lacks, and what follows from q [T, Hq, D] and `scale`.
    """
    dim, card = q.shape[2], card_of(q.device)
    args.part_queries, args.ctas = part_queries(args.group), card.sms
    args.scale = scale * math.log2(math.e)
    kernel = jit.kernel(SOURCE, "prompt_attn", defines(q.dtype, dim, card, prefixes=prefixes))
    shared_bytes = ring_stages(dim, card) * stage_bytes(dim)
    kernel.launch(card.sms, PROMPT_THREADS, args, shared_bytes=shared_bytes, pdl=pdl)


def _check_operands(
    q: torch.Tensor, tables: BlockTables, work: PromptWork, out: torch.Tensor
) -> None:
    heads = work.kv_heads * work.group
    if q.dtype not in operands.DTYPES or q.dim() != 3 or q.shape[1] != heads:
        raise ValueError(
            f"expected q as [T, {heads}, D] in 16 bits, got {list(q.shape)}, {q.dtype}"
        )
    rows, _, dim = q.shape
    if dim not in HEAD_DIMS or rows < work.rows or not q[0].is_contiguous() or q.stride(0) % 2:
        raise ValueError(
            f"expected {work.rows} contiguous rows of q or more, with D in {HEAD_DIMS}, got "
            f"{list(q.shape)} with strides {list(q.stride())}"
        )
    addresses, blocks = tables.addresses, ceil_div(work.positions, KV_BLOCK)
    room = (max(len(addresses), work.slots), max(addresses.shape[1], blocks))
    operands.check_operands(
        q.device,
        {
            "out": (out, (rows, heads * dim), q.dtype),
            "tables": (addresses, room, torch.int64),
            "tiles": (work.tiles, tuple(work.tiles.shape), torch.int32),
        },
    )


def part_queries(group: int) -> int:
    """Queries of a warpgroup's part of a tile, for `group` query heads of each KV head."""
    return PROMPT_PART_ROWS // group


def stage_bytes(head_dim: int) -> int:
    """Bytes of a stage: the keys or the values of a KV block, in whole panels."""
    return ceil_div(head_dim, PANEL_COLS) * KV_BLOCK * 2 * PANEL_COLS


def ring_stages(head_dim: int, card: Card) -> int:
    """Stages of the ring of a CTA, which has an SM of `card` alone."""
    return min(PROMPT_MAX_STAGES, card.lone_ring_bytes // stage_bytes(head_dim))


def defines(
    dtype: torch.dtype, head_dim: int, card: Card, *, prefixes: bool = False
) -> dict[str, int]:
    """Macros of the kernel's variant; with `prefixes`, of that for decode rows (cascade.py)."""
    return {
        **operands.defines(dtype),
        "HEAD_DIM": head_dim,
        "PREFIXES": int(prefixes),
        "STAGES": ring_stages(head_dim, card),
    }


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    """Without shared prefixes, and with them where SplitK_FlashAttn goes on from their results."""
    return [
        defines(needs.dtype, needs.head_dim, needs.card, prefixes=prefixes)
        for prefixes in (False, True)[: 1 + (needs.group <= MAX_GROUP_HEADS)]
    ]
