"""SplitKFlashAttn: attention over a PartitionedKVCache, which it reads where it lies.

Knows tensors and that cache, no models: what rotates queries and keys is the caller's.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from dakrun.geometry import MAX_GROUP_HEADS
from dakrun.kernels.attention import kv_blocks
from dakrun.kernels.attention.config import AttentionConfig, attention_config
from dakrun.kernels.attention.splitk import Workspace, splitk_flash_attn
from dakrun.kernels.runtime.jit import has_kernels, sm_count
from dakrun.nn.kv_cache import PartitionedKVCache

_config = functools.cache(attention_config)


class SplitKFlashAttn(nn.Module):
    """Causal attention as torch's scaled_dot_product_attention has it, over a cache beside it.

    One new token a slot is appended by SplitK_FlashAttn, which reads both tiers at once on a GPU;
    CUDA graphs can capture that once it has run for such a cache, which compiles the kernel and
    takes memory for the parts of long slots. On a CPU plain torch computes the same from the same
    packed slots. Several new tokens, a prefill, need empty slots: torch's attention serves them,
    and they are packed into their tiers. No gradients, no dropout.

    It has no parameters, and may serve all layers of a model on one stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[tuple[AttentionConfig, int, torch.device], Workspace] = {}

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
        """out [B, Hq, L, D] of query [B, Hq, L, D], where key and value [B, Hkv, L, D] are new.

        Query head h attends to KV head h // (Hq // Hkv), as with `enable_gqa`; Hq is up to 16 times
        Hkv. All are of the cache's dtype and on its device. Scores are multiplied by `scale`, else
        by D ** -0.5. Layers of the cache take turns from 0 on. In a prefill the first `padding[b]`
        tokens of slot b are none: they are not kept, and see themselves alone.
        Raises ValueError where something does not fit, or has no room.
        """
        _check(query, key, value, cache, padding)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        cache.begin(layer, query.shape[2])
        if query.shape[2] > 1:
            return _prefill(query, key, value, cache, layer, padding, scale)
        q, k, v = (x.squeeze(2) for x in (query, key, value))
        if _has_kernel(query):
            out = self._decode(q, k, v, cache, layer, scale)
        else:
            out = _decode_in_torch(q, k, v, cache, layer, scale)
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
        """out [B, Hq * D] of q [B, Hq, D] and k and v [B, Hkv, D] by the kernel."""
        heads = (q.shape[1], k.shape[1], v.shape[1])
        config = _config(cache.shape, cache.slots, cache.access, sms=sm_count(q.device))
        of = (config, heads[0] // heads[1], q.device)
        if of not in self._workspaces:
            self._workspaces[of] = Workspace.empty(*of)
        with torch.cuda.device_of(q):
            q, k, v = torch.cat((q, k, v), 1).split(heads, 1)  # rows equally far apart
            return splitk_flash_attn(
                q, k, v, cache.addresses[layer], cache.lengths, config, self._workspaces[of],
                q.new_empty(len(q), q.shape[1] * q.shape[2]), scale=scale,
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
            of = f"[{cache.batch}, {'Hq' if name == 'query' else heads}, L, {dim}]"
            raise ValueError(
                f"expected {name} as {of} of {cache.dtype} on {cache.device}, got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
    if query.shape[1] % heads or not heads <= query.shape[1] <= MAX_GROUP_HEADS * heads:
        raise ValueError(
            f"expected 1 to {MAX_GROUP_HEADS} query heads for each of {heads}, got {query.shape[1]}"
        )
    if padding is not None and (
        count == 1 or len(padding) != cache.batch or not all(0 <= n < count for n in padding)
    ):
        raise ValueError(
            f"expected less padding than tokens, of {cache.batch} slots and in a prefill only, got "
            f"{padding} of {count} tokens"
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
    """Torch's attention among the new tokens, which are then kept."""
    count = query.shape[2]
    kept = torch.full_like(cache.lengths, count)
    mask = None
    if padding is not None and any(padding):
        left_out = torch.tensor(padding, dtype=torch.int32, device=query.device)
        kept -= left_out
        positions = torch.arange(count, device=query.device)
        causal = positions[:, None] >= positions
        # With nothing to see, some of torch's kernels would make NaN of it.
        mask = causal & (positions >= left_out[:, None, None, None]) | causal & causal.t()
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    cache.fill(layer, key, value, padding or [0] * cache.batch)
    cache.end(layer, kept)
    return out


def _decode_in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PartitionedKVCache,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """out [B, Hq, D] of q [B, Hq, D], slot by slot; k and v [B, Hkv, D] are appended before."""
    out = torch.empty_like(q)
    for number, slot in enumerate(cache.slots_of(layer)):
        length = int(cache.lengths[number])
        kv_blocks.append(slot, k[number], v[number], length, cache.shape)
        keys, values = (
            part[:, : length + 1] for part in kv_blocks.unpack(slot, cache.dtype, cache.shape)
        )
        out[number] = F.scaled_dot_product_attention(
            q[number, :, None], keys, values, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        ).squeeze(1)
    return out
