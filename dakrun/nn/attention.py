"""SplitKFlashAttn: attention over a PartitionedKVCache, whose tiers kernels read in place.

Knows tensors and that cache, no models: the caller applies rotary embeddings.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from dakrun.geometry import KV_BLOCK, MAX_GROUP_HEADS
from dakrun.kernels import store_kv
from dakrun.kernels.attention import (
    AttentionConfig,
    AttentionWorkspace,
    PromptSegment,
    PromptWork,
    attention_config,
    kv_blocks,
    list_items,
    prompt_attn,
    splitk_flash_attn,
)
from dakrun.kernels.runtime import card_of, has_kernels
from dakrun.nn.kv_cache import PartitionedKVCache

_config = functools.cache(attention_config)


class SplitKFlashAttn(nn.Module):
    """Causal attention like torch's scaled_dot_product_attention, over a PartitionedKVCache.

    >>> cache = PartitionedKVCache(2, 1, 64, 16, dtype=torch.float16, ratio=0.5)
    >>> attention = SplitKFlashAttn()
    >>> q, k, v = torch.randn(3, 2, 1, 9, 64).half()  # [batch, heads, tokens, head size]
    >>> attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], cache).shape  # a prefill
    torch.Size([2, 1, 8, 64])
    >>> attention(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:], cache).shape  # a decode step
    torch.Size([2, 1, 1, 64])
    >>> cache.lengths.tolist()
    [9, 9]

    Decode: one new token per slot is appended and attended to. On a GPU SplitK_FlashAttn does both
    and reads both tiers at once; on a CPU plain torch reads the same packed slots. CUDA graphs can
    capture a step once one has run for such a cache, which compiles the kernel and allocates
    workspace for splitting long slots.

    Prefill: several new tokens per slot of empty slots. Torch computes them, and their keys and
    values are packed into the tiers.

    Verify: several new tokens per slot of filled slots, such as drafts behind the newest one, are
    appended, and each attends to what is before it. `cache.drop` takes wrong ones back.

    Computes no gradients and no dropout. Has no parameters; one module can serve all layers of a
    model on one stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[tuple[AttentionConfig, int, torch.device], AttentionWorkspace] = {}

    @torch.no_grad()
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PartitionedKVCache,
        *,
        layer: int = 0,
        padding: Sequence[int] | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """out [B, Hq, L, D] of query [B, Hq, L, D] and the new key and value [B, Hkv, L, D].

        All have the cache's dtype and device. Query head h attends to KV head h // (Hq // Hkv), as
        with `enable_gqa`; Hq is at most 16 times Hkv. Scores are multiplied by `scale`, by default
        D ** -0.5. Calls go through the cache's layers in order, from 0. In a prefill, the first
        `padding[b]` tokens of slot b are padding: they are not stored, and attend to themselves.
        Raises ValueError if an operand does not match the cache, or a slot is full.
        """
        _check(query, key, value, cache, padding)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        cache.begin(layer, query.shape[2])
        if query.shape[2] > 1:
            if not cache.appends:
                return _prefill(query, key, value, cache, layer, padding, scale)
            if padding is not None:
                raise ValueError("expected padding in a prefill of empty slots only")
            verify = _verify if _has_kernel(query) else _verify_in_torch
            out = verify(query, key, value, cache, layer, scale)
            cache.end(layer, query.shape[2])
            return out
        q, k, v = (x.squeeze(2) for x in (query, key, value))
        if _has_kernel(query):
            out = self._decode(q, k, v, cache, layer, scale)
        else:
            out = _decode_in_torch(q, k, v, cache.slots_of(layer), cache, scale)
        cache.end(layer, 1)
        return out.view(query.shape)

    def _decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: PartitionedKVCache,
        layer: int,
        scale: float,
    ) -> torch.Tensor:
        """out [B, Hq * D] of q [B, Hq, D], k and v [B, Hkv, D], by the kernel."""
        heads = (q.shape[1], k.shape[1], v.shape[1])
        config = _config(cache.shape, cache.slots, cache.access, card=card_of(q.device))
        key = (config, heads[0] // heads[1], q.device)
        if key not in self._workspaces:
            self._workspaces[key] = AttentionWorkspace.empty([config], *key[1:])
        with torch.cuda.device_of(q):
            q, k, v = torch.cat((q, k, v), 1).split(heads, 1)  # equal row strides
            workspace = self._workspaces[key]
            list_items(cache.lengths, config, workspace)
            return splitk_flash_attn(
                q, k, v, cache.tables, cache.lengths, config, workspace,
                q.new_empty(len(q), q.shape[1] * q.shape[2]), scale=scale, layer=layer,
            )  # fmt: skip


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PartitionedKVCache,
    padding: Sequence[int] | None,
) -> None:
    shape, count = cache.shape, query.shape[2] if query.dim() == 4 else 0
    heads, dim = shape.kv_heads, shape.head_dim
    for name, tensor, size in (
        ("query", query, (cache.batch, query.shape[1], count, dim) if count else (0,)),
        ("key", key, (cache.batch, heads, count, dim)),
        ("value", value, (cache.batch, heads, count, dim)),
    ):
        if tensor.shape != size or tensor.dtype != cache.dtype or tensor.device != cache.device:
            shape_text = f"[{cache.batch}, {'Hq' if name == 'query' else heads}, L, {dim}]"
            raise ValueError(
                f"expected {name} as {shape_text} of {cache.dtype} on {cache.device}, got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
    if query.shape[1] % heads or not heads <= query.shape[1] <= MAX_GROUP_HEADS * heads:
        raise ValueError(
            f"expected 1 to {MAX_GROUP_HEADS} query heads for each of {heads} KV heads, got "
            f"{query.shape[1]} in all"
        )
    if padding is not None and (
        count == 1 or len(padding) != cache.batch or not all(0 <= n < count for n in padding)
    ):
        raise ValueError(
            f"expected the padding of each of {cache.batch} slots, less than all its new tokens, "
            f"in a prefill only, got {padding} of {count} tokens"
        )


def _has_kernel(query: torch.Tensor) -> bool:
    return has_kernels(query.device)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PartitionedKVCache,
    layer: int,
    padding: Sequence[int] | None,
    scale: float,
) -> torch.Tensor:
    """Attention among the new tokens by torch; stores their keys and values."""
    count = query.shape[2]
    stored = torch.full_like(cache.lengths, count)
    mask = None
    if padding is not None and any(padding):
        pads = torch.tensor(padding, dtype=torch.int32, device=query.device)
        stored -= pads
        positions = torch.arange(count, device=query.device)
        causal = positions[:, None] >= positions
        # Padding attends to itself: some of torch's kernels return NaN for fully masked rows.
        mask = causal & (positions >= pads[:, None, None, None]) | causal & causal.t()
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    cache.fill(layer, key, value, padding or [0] * cache.batch)
    cache.end(layer, stored)
    return out


def _decode_in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: Sequence[torch.Tensor],
    cache: PartitionedKVCache,
    scale: float,
) -> torch.Tensor:
    """out [B, Hq, D] of q [B, Hq, D] slot by slot, after appending k and v [B, Hkv, D]."""
    out = torch.empty_like(q)
    for number, slot in enumerate(slots):
        length = int(cache.lengths[number])
        kv_blocks.append(slot, k[number], v[number], length, cache.shape)
        keys, values = (
            part[:, : length + 1] for part in kv_blocks.unpack(slot, cache.dtype, cache.shape)
        )
        out[number] = F.scaled_dot_product_attention(
            q[number, :, None], keys, values, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        ).squeeze(1)
    return out


def _verify(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PartitionedKVCache,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """Appends several tokens a slot and attends from them, by the kernels of prompts."""
    batch, heads, count, dim = query.shape
    lengths, tables = cache.lengths, cache.tables
    at = lengths[:, None] + torch.arange(count, dtype=torch.int32, device=lengths.device)
    blocks = tables.addresses.gather(1, (at // KV_BLOCK).long())
    keys = blocks + at % KV_BLOCK * cache.shape.layout.row_bytes
    steps = torch.tensor([tables.layer_bytes, tables.head_bytes], device=keys.device)
    kv_addresses = torch.cat((keys.view(-1, 1), steps.expand(keys.numel(), 2)), 1)
    joined = torch.cat((query, key, value), 1).transpose(1, 2).flatten(0, 1).contiguous()
    starts = enumerate(lengths.tolist())
    work = PromptWork.of(
        [PromptSegment(slot * count, slot, start, count) for slot, start in starts],
        kv_heads=key.shape[1], group=heads // key.shape[1], head_dim=dim, device=query.device,
    )  # fmt: skip
    out = query.new_empty(batch * count, heads * dim)
    with torch.cuda.device_of(query):
        store_kv(joined, at.flatten(), kv_addresses, layer, kv_heads=key.shape[1])
        prompt_attn(joined[:, :heads], tables, work, out, scale=scale, layer=layer)
    return out.view(batch, count, heads, dim).transpose(1, 2)


def _verify_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PartitionedKVCache,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """The same in plain torch, slot by slot."""
    out, count = torch.empty_like(query), query.shape[2]
    for number, slot in enumerate(cache.slots_of(layer)):
        start = int(cache.lengths[number])
        kv_blocks.write(slot, key[number], value[number], start, cache.shape)
        keys, values = kv_blocks.read(slot, start + count, cache.dtype, cache.shape)
        mask = torch.ones(count, start + count, dtype=torch.bool, device=out.device).tril(start)
        out[number] = F.scaled_dot_product_attention(
            query[number], keys, values, mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    return out
