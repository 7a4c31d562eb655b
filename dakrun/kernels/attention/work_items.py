"""The work items of SplitK_FlashAttn: their list, the room for it, and what lists them.

Wraps list_items.cu, whose arguments are those of splitk_flash_attn.cu.
"""

import ctypes
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dakrun.geometry import (
    ATTENTION_PARTIAL_EXTRA,
    ELEMENTWISE_THREADS,
    HEAD_DIMS,
    MAX_GROUP_HEADS,
    MAX_TIERS,
)
from dakrun.kernels.attention.cascade import PrefixAttention
from dakrun.kernels.attention.config import AttentionConfig
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import CtaOrder

SOURCE = "list_items.cu"
ITEM_INTS = 8  # of ListedItem in native/splitk_flash_attn.cuh


class Tier(ctypes.Structure):
    """Tier of native/splitk_flash_attn.cuh."""

    _fields_ = operands.ints("first_slot", "first_cta", "window", "slot_step")


class Args(ctypes.Structure):
    """SplitKFlashAttnArgs of native/splitk_flash_attn.cuh."""

    _fields_ = (
        ("tiers", Tier * (MAX_TIERS + 1)),
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
            max, zip(*(workspace_sizes(config, group) for config in configs), strict=True)
        )
        items = max(map(_item_count, configs))
        return cls(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(arrivals, dtype=torch.int32, device=device),
            torch.empty(items, ITEM_INTS, dtype=torch.int32, device=device),
            torch.zeros(MAX_TIERS, dtype=torch.int32, device=device),
        )


def workspace_sizes(config: AttentionConfig, group: int) -> tuple[int, int]:
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
    check_spilled(config, lengths, spilled)
    slots = (sum(config.slots),)
    rows: dict[str, operands.Wanted] = {
        "lengths": (lengths, slots, torch.int32),
        "table_of": (lengths if table_of is None else table_of, slots, torch.int32),
    }
    operands.check_operands(lengths.device, rows)
    operands.check_gpu(lengths.device)
    check_items(config, workspace)
    args = Args(
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
    args.tiers[:] = tiers_of(config)
    macros = defines(prefixes=prefixes is not None, reads_spilled=config.reads_spilled)
    kernel = jit.kernel(SOURCE, "list_items", macros)
    kernel.launch(len(config.slots), ELEMENTWISE_THREADS, args)


@functools.lru_cache(maxsize=1024)
def tiers_of(config: AttentionConfig) -> tuple[Tier, ...]:
    """The kernel's `tiers`, with the end of the last one."""
    found, slot, cta = [], 0, 0
    for number, count in enumerate(config.slots):
        spread = config.spread and number == 0
        found.append(
            Tier(
                first_slot=slot,
                first_cta=cta,
                window=config.windows[number],
                slot_step=_spread_step(count) if spread else 1,
            )
        )
        slot += count
        cta += config.ctas[number]
    return (*found, *[Tier(first_slot=slot, first_cta=cta)] * (MAX_TIERS + 1 - len(found)))


def check_spilled(
    config: AttentionConfig, lengths: torch.Tensor, spilled: torch.Tensor | None
) -> None:
    """Raise ValueError unless `spilled`, int32 [B], is there if `config` reads_spilled alone."""
    if config.reads_spilled != (spilled is not None) or (
        spilled is not None and spilled.shape != lengths.shape
    ):
        raise ValueError(
            "expected `spilled` for each slot with a config that reads_spilled, and only there"
        )


def check_items(config: AttentionConfig, workspace: AttentionWorkspace) -> None:
    """Raise ValueError if the workspace has no room for the work items of `config`."""
    if workspace.items.numel() < ITEM_INTS * (items := _item_count(config)):
        raise ValueError(f"expected a workspace with room for {items} items or more")


@functools.cache
def _spread_step(slots: int) -> int:
    """Stride in which `slots` are listed that spreads the consecutive slots of each tier evenly.

    The number closest to slots / golden ratio that is coprime to `slots`.
    """
    golden = slots * (math.sqrt(5) - 1) / 2
    steps = (step for step in range(1, slots) if math.gcd(step, slots) == 1)
    return min(steps, key=lambda step: abs(step - golden), default=1)


def defines(*, prefixes: bool, reads_spilled: bool) -> dict[str, int]:
    """Macros of list_items.cu; the first ones change nothing."""
    any_heads = {"BFLOAT16": 0, "HEAD_DIM": HEAD_DIMS[0], "GROUP_TILES": 1, "HEAD_NORMS": 0}
    return {**any_heads, "PREFIXES": int(prefixes), "SPILLED": int(reads_spilled)}


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    if needs.group > MAX_GROUP_HEADS:
        return []
    return [defines(prefixes=some, reads_spilled=needs.spills) for some in (False, True)]
