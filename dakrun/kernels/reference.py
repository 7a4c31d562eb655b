"""Reference backend: the kernels in plain torch, on any device.

Every row is computed from the tier that holds it, so a misplaced row block gives a wrong result.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dakrun.memory.tiers import PartitionedTensor


def linear(
    x: torch.Tensor, weight: PartitionedTensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [N, K] weight [M, K]^T + bias [M]: [N, M] in x's dtype, contiguous.

    Computed as weight x^T: for few rows N the CPU's BLAS then streams the weight at up to twice the
    speed, and every part writes its own rows of the result.
    Raises ValueError for shapes or dtypes that do not match.
    """
    rows, cols = weight.shape
    if x.ndim != 2 or x.shape[1] != cols or x.dtype != weight.dtype:
        raise ValueError(
            f"expected x [N, {cols}] of {weight.dtype}, got {tuple(x.shape)} of {x.dtype}"
        )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"expected bias [{rows}], got {tuple(bias.shape)}")
    xt = x.t().contiguous()
    out = x.new_empty(rows, x.shape[0])
    for part in weight.parts:
        torch.mm(part.data.to(x.device), xt, out=out[part.rows])
    if bias is not None:
        out += bias[:, None]
    return out.t().contiguous()


def gather_rows(table: PartitionedTensor, ids: torch.Tensor) -> torch.Tensor:
    """table [V, K][ids]: [N, K] on the device of `ids`, which is int64 [N]."""
    if ids.ndim != 1 or ids.dtype != torch.int64:
        raise ValueError(f"expected ids [N] of int64, got {tuple(ids.shape)} of {ids.dtype}")
    out = torch.empty(ids.shape[0], table.shape[1], dtype=table.dtype, device=ids.device)
    for part in table.parts:
        index = torch.nonzero((ids >= part.rows.start) & (ids < part.rows.stop)).flatten()
        if index.numel():
            rows = (ids[index] - part.rows.start).to(part.data.device)
            out[index] = part.data[rows].to(ids.device)
    return out


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    positions: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Append one position to each slot's cache and attend to all positions up to it.

    q is [B, Hq, D], k and v [B, Hkv, D]; caches[b] holds keys and values [Hkv, P, D] in the
    slot's tier, of which the first positions[b] are filled. Returns [B, Hq * D].
    """
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    if len(caches) != batch or len(positions) != batch or heads % kv_heads:
        raise ValueError(
            f"expected {batch} caches and positions and a multiple of {kv_heads} query heads, "
            f"got {len(caches)}, {len(positions)} and {heads}"
        )
    grouped = q.view(batch, 1, kv_heads, heads // kv_heads, dim)
    out = torch.empty_like(grouped)
    for b, ((keys, values), position) in enumerate(zip(caches, positions, strict=True)):
        keys[:, position] = k[b]
        values[:, position] = v[b]
        out[b] = F.scaled_dot_product_attention(
            grouped[b],
            keys[None, :, : position + 1].to(q.device),
            values[None, :, : position + 1].to(q.device),
            scale=scale,
        )
    return _with_lost_nan(out.view(batch, heads, dim), q, k).flatten(1)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    start: int,
    scale: float,
) -> torch.Tensor:
    """Append T positions to one slot, from `start` on, with causal attention.

    q is [T, Hq, D], k and v [T, Hkv, D]; cache holds keys and values [Hkv, P, D], filled up to
    `start`. Returns [T, Hq * D].
    """
    tokens, heads, dim = q.shape
    keys, values = cache
    end = start + tokens
    keys[:, start:end] = k.transpose(0, 1)
    values[:, start:end] = v.transpose(0, 1)
    mask = None
    if start:
        mask = torch.ones(tokens, end, dtype=torch.bool, device=q.device).tril(start)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None, :, :end].to(q.device),
        values[None, :, :end].to(q.device),
        attn_mask=mask,
        is_causal=start == 0,
        scale=scale,
        enable_gqa=heads != k.shape[1],
    )
    return _with_lost_nan(out[0].transpose(0, 1), q, k).reshape(tokens, heads * dim)


def _with_lost_nan(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Attention `out` [T, Hq, D] of q to keys up to its own, k [T, Hkv, D]; NaN where it must be.

    On the CPU torch returns 0 instead for a query whose scores are all NaN, its own key's included.
    """
    groups = q.unflatten(1, (k.shape[1], -1)).float()
    own = torch.einsum("thgd,thd->thg", groups, k.float()).flatten(1)
    return out.masked_fill(own.isnan()[:, :, None], torch.nan)
