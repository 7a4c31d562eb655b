"""Causal attention of prompts of any lengths, side by side: torch's fused kernels on a GPU.

Knows lengths, no slots and no caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from dakrun.memory.device import upload


@dataclass(frozen=True)
class Lengths:
    """Those of prompts that follow each other, and on the device int32 [prompts + 1] their ends."""

    each: tuple[int, ...]
    ends: torch.Tensor

    @classmethod
    def of(cls, each: Sequence[int], device: torch.device) -> "Lengths":
        """Lengths, the ends of which go to `device`."""
        ends = torch.tensor([0, *accumulate(each)], dtype=torch.int32)
        return cls(tuple(each), upload(ends, device))


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    *,
    scale: float,
) -> torch.Tensor:
    """[T, Hq, D] of q [T, Hq, D], k and v [P, Hkv, D], of prompts one after the other.

    A prompt's queries are those of its last positions; each sees the keys up to its own. Needs no
    memory but for what it returns and a float for each head of a query.
    """
    if queries is keys and len(queries.each) > 1 and len(set(queries.each)) == 1:
        own, first, last = (
            x.unflatten(0, (len(queries.each), -1)).transpose(1, 2) for x in (q, k, v)
        )
        same = F.scaled_dot_product_attention(
            own, first, last, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return same.transpose(1, 2).flatten(0, 1)
    if not q.is_cuda:
        return _reference(q, k, v, queries, keys, scale)
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.ends, keys.ends, max(queries.each), max(keys.each),
        0.0, True, False, scale=scale,
    )  # fmt: skip
    return found[0]


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    scale: float,
) -> torch.Tensor:
    """The same one prompt after the other, on any device."""
    out = []
    for own, first, last in zip(
        q.split(queries.each), k.split(keys.each), v.split(keys.each), strict=True
    ):
        length, end = len(own), len(first)
        mask = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(end - length)
        found = F.scaled_dot_product_attention(
            own.transpose(0, 1)[None], first.transpose(0, 1)[None], last.transpose(0, 1)[None],
            attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        out.append(found[0].transpose(0, 1))
    return torch.cat(out)
