"""SplitK_FlashAttn: decode attention over slots in several tiers.

Wraps splitk_flash_attn.cu, whose work items work_items.py lists.
Knows operands and a launch configuration, no models and no plans.
"""

import math

import torch

from dakrun.geometry import (
    ATTENTION_WARPS,
    ATTENTION_WARPS_LARGE_GROUP,
    KV_BLOCK,
    MAX_GROUP_HEADS,
    MAX_TIERS,
)
from dakrun.kernels.attention.cascade import PrefixAttention
from dakrun.kernels.attention.config import AttentionConfig
from dakrun.kernels.attention.kv_blocks import DTYPES, BlockTables
from dakrun.kernels.attention.work_items import (
    Args,
    AttentionWorkspace,
    check_items,
    check_spilled,
    tiers_of,
    workspace_sizes,
)
from dakrun.kernels.normalize_heads import HeadNorms
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import CtaOrder
from dakrun.units import ceil_div

SOURCE = "splitk_flash_attn.cu"


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
    args = Args(
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
    args.tiers[:] = tiers_of(config)
    check_spilled(config, lengths, spilled)
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
    check_items(config, workspace)
    partials, arrivals = workspace_sizes(config, group)
    if workspace.partials.numel() < partials or workspace.arrivals.numel() < arrivals:
        raise ValueError(f"expected a workspace of {partials} and {arrivals} elements or more")


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
