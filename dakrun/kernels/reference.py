"""Reference backend: the kernels in plain torch, on any device.

Every row is computed from the tier that holds it, so a misplaced row block gives a wrong result.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dakrun.memory.matrix import TieredMatrix

# From so many float32 rows on, two cores with AVX2 multiply weights by x^T faster than x by
# weights^T, up to twice as fast. With fewer rows the latter is mostly faster, up to 5 times where
# weights are small, and with types of 16 bits 3 to 10 times.
WEIGHT_FIRST_ROWS = 16
PIECE_ELEMENTS = 1 << 20  # of a quantised weight that are expanded at a time


def linear(x: torch.Tensor, weight: TieredMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, K] weight [M, K]^T + bias [M]: [N, M] in x's dtype, contiguous.

    Raises ValueError for shapes or dtypes that do not match.
    """
    rows, cols = weight.shape
    if x.ndim != 2 or x.shape[1] != cols or x.dtype != weight.dtype:
        raise ValueError(
            f"expected x [N, {cols}] of {weight.dtype}, got {tuple(x.shape)} of {x.dtype}"
        )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"expected bias [{rows}], got {tuple(bias.shape)}")
    if x.dtype == torch.float32 and x.shape[0] >= WEIGHT_FIRST_ROWS:
        xt = x.t().contiguous()
        transposed = x.new_empty(rows, x.shape[0])
        for some, matrix in weight.dense_rows(PIECE_ELEMENTS, x.device):
            torch.mm(matrix, xt, out=transposed[some])
        out = transposed.t().contiguous()
    else:
        out = x.new_empty(x.shape[0], rows)
        for some, matrix in weight.dense_rows(PIECE_ELEMENTS, x.device):
            out[:, some] = torch.mm(x, matrix.t())
    if bias is not None:
        out += bias
    return out


def gather_rows(table: TieredMatrix, ids: torch.Tensor) -> torch.Tensor:
    """table [V, K][ids]: [N, K] on the device of `ids`, which is int64 [N]."""
    if ids.ndim != 1 or ids.dtype != torch.int64:
        raise ValueError(f"expected ids [N] of int64, got {tuple(ids.shape)} of {ids.dtype}")
    out = torch.empty(ids.shape[0], table.shape[1], dtype=table.dtype, device=ids.device)
    for part, some in table.rows:
        index = torch.nonzero((ids >= some.start) & (ids < some.stop)).flatten()
        if index.numel():
            matrix = table.read(part)
            out[index] = matrix[(ids[index] - some.start).to(matrix.device)].to(ids.device)
    return out


def decode_attention(
    q: torch.Tensor, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float
) -> torch.Tensor:
    """Attention [B, Hq * D] of each slot's newest position, q [B, Hq, D], to all of its positions.

    caches[b] has keys and values [Hkv, P, D] of the slot's P positions, the newest included.
    """
    batch, heads, dim = q.shape
    if len(caches) != batch or heads % len(caches[0][0]):
        raise ValueError(
            f"expected {batch} caches with KV heads that divide {heads}, got {len(caches)} of "
            f"{len(caches[0][0])}"
        )
    newest = torch.stack([keys[:, -1] for keys, _ in caches])
    grouped = q.view(batch, 1, newest.shape[1], -1, dim)
    out = torch.empty_like(grouped)
    for b, (keys, values) in enumerate(caches):
        out[b] = F.scaled_dot_product_attention(grouped[b], keys[None], values[None], scale=scale)
    return _with_lost_nan(out.view(batch, heads, dim), q, newest).flatten(1)


def prefill_attention(
    q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], scale: float
) -> torch.Tensor:
    """Causal attention [T, Hq * D] of a slot's last T positions, q [T, Hq, D].

    `cache` has keys and values [Hkv, P, D] of all its positions, these included.
    """
    tokens, heads, dim = q.shape
    keys, values = cache
    start = keys.shape[1] - tokens
    mask = None
    if start:
        mask = torch.ones(tokens, keys.shape[1], dtype=torch.bool, device=q.device).tril(start)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=start == 0,
        scale=scale,
        enable_gqa=heads != len(keys),
    )
    own = keys[:, start:].transpose(0, 1)
    return _with_lost_nan(out[0].transpose(0, 1), q, own).reshape(tokens, heads * dim)


def _with_lost_nan(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Attention `out` [T, Hq, D] of q to keys up to its own, k [T, Hkv, D]; NaN where it must be.

    On the CPU torch returns 0 instead for a query whose scores are all NaN, its own key's included.
    """
    groups = q.unflatten(1, (k.shape[1], -1)).float()
    own = torch.einsum("thgd,thd->thg", groups, k.float()).flatten(1)
    return out.masked_fill(own.isnan()[:, :, None], torch.nan)
