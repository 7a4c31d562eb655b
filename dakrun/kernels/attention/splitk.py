"""SplitK_FlashAttn: decode attention over slots in several tiers.

Wraps splitk_flash_attn.cu and list_items.cu.
Knows operands and a launch configuration, no models and no plans.
"""

import ctypes
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dakrun.geometry import (
    ATTENTION_PARTIAL_EXTRA,
    ATTENTION_WARPS,
    ATTENTION_WARPS_LARGE_GROUP,
    ELEMENTWISE_THREADS,
    HEAD_DIMS,
    KV_BLOCK,
    MAX_GROUP_HEADS,
    MAX_TIERS,
)
from dakrun.kernels.attention.cascade import PrefixAttention
from dakrun.kernels.attention.config import AttentionConfig
from dakrun.kernels.attention.kv_blocks import DTYPES, BlockTables
from dakrun.kernels.normalize_heads import HeadNorms
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import CtaOrder
from dakrun.units import ceil_div

SOURCE, LIST_SOURCE = "splitk_flash_attn.cu", "list_items.cu"
ITEM_INTS = 8  # of ListedItem in native/splitk_flash_attn.cuh


class _Tier(ctypes.Structure):
    """Tier of native/splitk_flash_attn.cuh."""

    _fields_ = operands.ints("first_slot", "first_cta", "window", "slot_step")


class _Args(ctypes.Structure):
    """SplitKFlashAttnArgs of native/splitk_flash_attn.cuh."""

    _fields_ = (
        ("tiers", _Tier * (MAX_TIERS + 1)),
        *operands.pointers("tables", "table_of", "lengths", "q", "k", "v", "rotations"),
        *operands.pointers("out", "partials", "arrivals", "items", "item_counts"),
        ("stride", ctypes.c_int64),
        ("layer_offset", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("order", CtaOrder),
        *operands.ints("tier_count", "kv_heads", "group", "table_blocks"),
        *operands.ints("split_blocks", "chunk_blocks", "item_splits"),
        *operands.ints("max_splits", "max_chunks", "stages"),
        ("scale", ctypes.c_float),
        *operands.pointers("prefix_blocks", "prefixes", "spilled_blocks", "q_norm", "k_norm"),
        ("norm_eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results and work items: one workspace for all launches of a stream.

    `partials` is float32 [slots * Hkv * splits * chunks * group * (D + 4)] or more, `arrivals`
    int32 [slots * Hkv * (group + splits)] or more, zero between launches. `items`, int32
    [slots * Hkv * splits, 8] or more, are what list_items() writes, local slots twice if they have
    spilled blocks; `counts`, int32 [tiers], their numbers. They are for the operands of the last
    list_items().
    """

    partials: torch.Tensor
    arrivals: torch.Tensor
    items: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(
        cls, configs: Iterable[AttentionConfig], group: int, device: torch.device
    ) -> "AttentionWorkspace":
        """Allocate for launches of any of `configs` with `group` query heads per KV head."""
        configs = list(configs)
        partials, arrivals = map(
            max, zip(*(_workspace_sizes(config, group) for config in configs), strict=True)
        )
        items = max(map(_item_count, configs))
        return cls(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(arrivals, dtype=torch.int32, device=device),
            torch.empty(items, ITEM_INTS, dtype=torch.int32, device=device),
            torch.zeros(MAX_TIERS, dtype=torch.int32, device=device),
        )


def _workspace_sizes(config: AttentionConfig, group: int) -> tuple[int, int]:
    """Elements of the partial results and of the arrival counters."""
    heads = sum(config.slots) * config.shape.kv_heads
    parts = config.max_splits * config.max_chunks * group
    width = config.shape.head_dim + ATTENTION_PARTIAL_EXTRA
    return heads * parts * width, heads * (group + config.max_splits)


def _item_count(config: AttentionConfig) -> int:
    """Work items in the lists of all tiers, at most."""
    slots = sum(config.slots) + config.reads_spilled * config.slots[0]
    return slots * config.shape.kv_heads * config.max_splits


def list_items(
    lengths: torch.Tensor,
    config: AttentionConfig,
    workspace: AttentionWorkspace,
    *,
    table_of: torch.Tensor | None = None,
    prefixes: PrefixAttention | None = None,
    spilled: torch.Tensor | None = None,
) -> None:
    """List the work items of slots of `lengths` (int32 [B]) in `workspace`, once for all layers.

    Operands are those of splitk_flash_attn(), whose launches take the slots' lengths, the numbers
    of their block tables and their spilled blocks from the list. They read it before they wait for
    their predecessor: this launch must have ended when they begin.
    Raises ValueError if an operand has the wrong shape, dtype or device.
    """
    _check_spilled(config, lengths, spilled)
    slots = (sum(config.slots),)
    rows: dict[str, operands.Wanted] = {
        "lengths": (lengths, slots, torch.int32),
        "table_of": (lengths if table_of is None else table_of, slots, torch.int32),
    }
    operands.check_operands(lengths.device, rows)
    operands.check_gpu(lengths.device)
    _check_items(config, workspace)
    args = _Args(
        table_of=operands.address(table_of),
        lengths=lengths.data_ptr(),
        items=workspace.items.data_ptr(),
        item_counts=workspace.counts.data_ptr(),
        tier_count=len(config.slots),
        kv_heads=config.shape.kv_heads,
        split_blocks=config.split_blocks,
        item_splits=config.item_splits,
        max_splits=config.max_splits,
        prefix_blocks=0 if prefixes is None else prefixes.blocks.data_ptr(),
        spilled_blocks=operands.address(spilled),
    )
    args.tiers[:] = _tiers(config)
    macros = _list_defines(prefixes=prefixes is not None, reads_spilled=config.reads_spilled)
    kernel = jit.kernel(LIST_SOURCE, "list_items", macros)
    kernel.launch(len(config.slots), ELEMENTWISE_THREADS, args)


def splitk_flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: BlockTables,
    lengths: torch.Tensor,
    config: AttentionConfig,
    workspace: AttentionWorkspace,
    out: torch.Tensor,
    *,
    scale: float,
    layer: int = 0,
    table_of: torch.Tensor | None = None,
    rotations: torch.Tensor | None = None,
    prefixes: PrefixAttention | None = None,
    spilled: torch.Tensor | None = None,
    head_norms: HeadNorms | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [B, Hq * D] = attention of each slot's new token to its cached positions and itself.

    q is [B, Hq, D], k and v are [B, Hkv, D], of one 16-bit dtype, with equal strides between rows.
    The new keys and values are appended to the cache. `tables` say where the KV blocks of the slots
    lie in each `layer`; slots are ordered by tier. Slot b has block table table_of[b] (int32 [B]),
    or b by default. `lengths` (int32 [B]) has the slots' cached positions, for all of which, and
    for the new one, the table has blocks, fewer than the shape's; this is not checked, as they are
    on the device. A negative length marks a slot without a request, whose output stays as it is.
    Scores are q k^T times `scale`. With `rotations`, float32 [positions, D / 2, 2] of cosines and
    sines, q and k are rotated first (RoPE, half-split as in Llama). With `prefixes`, whose launch
    for the same rows came before, the leading KV blocks that rows share are not read again.
    list_items() for the same operands, also the values in them, came before, with the same
    `workspace`.
    `spilled`, int32 [B], is for a config that reads_spilled: the number of leading KV blocks of
    each local slot that lie in the first remote tier. `head_norms` are applied to q and k before
    they are rotated; not with `prefixes`, whose queries are to be normalized before.
    With `pdl` the launch may start before its predecessor ends; it then reads tables, the list and
    cached positions, which no kernel still running may write.
    Raises ValueError if an operand has the wrong shape, dtype, device or strides.
    """
    _check_operands((q, k, v), (tables, table_of), lengths, config, workspace, out, rotations)
    operands.check_gpu(q.device)
    kv_heads, dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    args = _Args(
        tables=tables.addresses.data_ptr(),
        table_of=operands.address(table_of),
        lengths=lengths.data_ptr(),
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        rotations=operands.address(rotations),
        out=out.data_ptr(),
        partials=workspace.partials.data_ptr(),
        arrivals=workspace.arrivals.data_ptr(),
        items=workspace.items.data_ptr(),
        item_counts=workspace.counts.data_ptr(),
        stride=q.stride(0),
        order=CtaOrder.of(config.ctas[0], sum(config.ctas) + config.idle),
        tier_count=len(config.slots),
        kv_heads=kv_heads,
        group=group,
        table_blocks=tables.addresses.shape[1],
        layer_offset=layer * tables.layer_bytes,
        head_bytes=tables.head_bytes,
        split_blocks=config.split_blocks,
        chunk_blocks=config.chunk_blocks,
        item_splits=config.item_splits,
        max_splits=config.max_splits,
        max_chunks=config.max_chunks,
        stages=config.stages,
        scale=scale * math.log2(math.e),
        prefix_blocks=0 if prefixes is None else prefixes.blocks.data_ptr(),
        prefixes=0 if prefixes is None else prefixes.results.data_ptr(),
        spilled_blocks=operands.address(spilled),
        q_norm=0 if head_norms is None else head_norms.q_weight.data_ptr(),
        k_norm=0 if head_norms is None else head_norms.k_weight.data_ptr(),
        norm_eps=0.0 if head_norms is None else head_norms.eps,
    )
    args.tiers[:] = _tiers(config)
    _check_spilled(config, lengths, spilled)
    if head_norms is not None:
        if prefixes is not None:
            raise ValueError("expected normalized heads with prefixes, and no norms of them")
        weights: dict[str, operands.Wanted] = {
            "q_weight": (head_norms.q_weight, (dim,), q.dtype),
            "k_weight": (head_norms.k_weight, (dim,), q.dtype),
        }
        operands.check_operands(q.device, weights)
    macros = defines(
        q.dtype, dim, group, prefixes=prefixes is not None, reads_spilled=config.reads_spilled,
        head_norms=head_norms is not None,
    )  # fmt: skip
    kernel = jit.kernel(SOURCE, "splitk_flash_attn", macros)
    kernel.launch(
        sum(config.ctas) + config.idle,
        cta_threads(group),
        args,
        shared_bytes=config.shared_bytes,
        pdl=pdl,
    )
    return out


@functools.lru_cache(maxsize=1024)
def _tiers(config: AttentionConfig) -> tuple[_Tier, ...]:
    """The kernel's `tiers`, with the end of the last one."""
    found, slot, cta = [], 0, 0
    for number, count in enumerate(config.slots):
        spread = config.spread and number == 0
        found.append(
            _Tier(
                first_slot=slot,
                first_cta=cta,
                window=config.windows[number],
                slot_step=_spread_step(count) if spread else 1,
            )
        )
        slot += count
        cta += config.ctas[number]
    return (*found, *[_Tier(first_slot=slot, first_cta=cta)] * (MAX_TIERS + 1 - len(found)))


def _check_spilled(
    config: AttentionConfig, lengths: torch.Tensor, spilled: torch.Tensor | None
) -> None:
    if config.reads_spilled != (spilled is not None) or (
        spilled is not None and spilled.shape != lengths.shape
    ):
        raise ValueError(
            "expected `spilled` for each slot with a config that reads_spilled, and only there"
        )


@functools.cache
def _spread_step(slots: int) -> int:
    """Stride in which `slots` are listed that spreads the consecutive slots of each tier evenly.

    The number closest to slots / golden ratio that is coprime to `slots`.
    """
    golden = slots * (math.sqrt(5) - 1) / 2
    steps = (step for step in range(1, slots) if math.gcd(step, slots) == 1)
    return min(steps, key=lambda step: abs(step - golden), default=1)


def _check_operands(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: tuple[BlockTables, torch.Tensor | None],
    lengths: torch.Tensor,
    config: AttentionConfig,
    workspace: AttentionWorkspace,
    out: torch.Tensor,
    rotations: torch.Tensor | None,
) -> None:
    (q, k, v), slots, shape = qkv, sum(config.slots), config.shape
    addresses, table_of = tables[0].addresses, tables[1]
    count = slots if table_of is None else len(addresses)
    heads, dim, device = shape.kv_heads, shape.head_dim, q.device
    if q.dtype not in DTYPES or q.dim() != 3 or q.shape[1] % heads:
        raise ValueError(f"expected q as [B, Hq, {dim}] in 16 bits, got {list(q.shape)}, {q.dtype}")
    group = q.shape[1] // heads
    rows: dict[str, operands.Wanted] = {
        "q": (q, (slots, heads * group, dim), q.dtype),
        "k": (k, (slots, heads, dim), q.dtype),
        "v": (v, (slots, heads, dim), q.dtype),
    }
    operands.check_operands(device, rows, contiguous=False)
    operands.check_operands(
        device,
        {
            "out": (out, (slots, heads * group * dim), q.dtype),
            "tables": (addresses, (count, shape.blocks), torch.int64),
            "table_of": (lengths if table_of is None else table_of, (slots,), torch.int32),
            "lengths": (lengths, (slots,), torch.int32),
        },
    )
    if len({tensor.stride(0) for tensor in qkv}) > 1 or not all(
        tensor[0].is_contiguous() for tensor in qkv
    ):
        raise ValueError("expected contiguous rows of q, k and v with equal strides between rows")
    if not 1 <= group <= MAX_GROUP_HEADS or len(config.slots) > MAX_TIERS:
        raise ValueError(
            f"expected 1 to {MAX_GROUP_HEADS} query heads per KV head and at most {MAX_TIERS} "
            f"tiers, got {group} and {len(config.slots)}"
        )
    if rotations is not None and (
        rotations.shape[1:] != (dim // 2, 2)
        or len(rotations) < shape.blocks * KV_BLOCK
        or rotations.dtype != torch.float32
        or not rotations.is_contiguous()
    ):
        raise ValueError(f"expected rotations for {shape}, got {list(rotations.shape)}")
    _check_items(config, workspace)
    partials, arrivals = _workspace_sizes(config, group)
    if workspace.partials.numel() < partials or workspace.arrivals.numel() < arrivals:
        raise ValueError(f"expected a workspace of {partials} and {arrivals} elements or more")


def _check_items(config: AttentionConfig, workspace: AttentionWorkspace) -> None:
    if workspace.items.numel() < ITEM_INTS * (items := _item_count(config)):
        raise ValueError(f"expected a workspace with room for {items} items or more")


def cta_threads(group: int) -> int:
    """Threads of a CTA: the attention warps, fewer for large groups, and the producer warp."""
    return 32 * (1 + (ATTENTION_WARPS if group <= 8 else ATTENTION_WARPS_LARGE_GROUP))


def defines(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    *,
    prefixes: bool = False,
    reads_spilled: bool = False,
    head_norms: bool = False,
) -> dict[str, int]:
    """Macros of the kernel's variant for `group` query heads per KV head."""
    tiles = {"GROUP_TILES": ceil_div(group, 8)}
    tiles |= {
        "PREFIXES": int(prefixes),
        "SPILLED": int(reads_spilled),
        "HEAD_NORMS": int(head_norms),
    }
    return {**operands.defines(dtype), "HEAD_DIM": head_dim, **tiles}


@compiled_ahead(SOURCE, seconds=1.5)
def _variants(needs: Needs) -> list[Macros]:
    """With shared prefixes and without; the kernel for these never normalizes heads.

    There is none for larger groups, whose rows prompt attention takes (row_tiles.py).
    """
    if needs.group > MAX_GROUP_HEADS:
        return []
    return [
        defines(
            needs.dtype, needs.head_dim, needs.group, prefixes=prefixes,
            reads_spilled=needs.spills, head_norms=needs.head_norms and not prefixes,
        )
        for prefixes in (False, True)
    ]  # fmt: skip


def _list_defines(*, prefixes: bool, reads_spilled: bool) -> dict[str, int]:
    """Macros of list_items.cu; the first ones change nothing."""
    any_heads = {"BFLOAT16": 0, "HEAD_DIM": HEAD_DIMS[0], "GROUP_TILES": 1, "HEAD_NORMS": 0}
    return {**any_heads, "PREFIXES": int(prefixes), "SPILLED": int(reads_spilled)}


@compiled_ahead(LIST_SOURCE)
def _list_variants(needs: Needs) -> list[Macros]:
    if needs.group > MAX_GROUP_HEADS:
        return []
    return [_list_defines(prefixes=some, reads_spilled=needs.spills) for some in (False, True)]
