"""Attention of prompts beside each other, as of each one alone in float64."""

from collections.abc import Sequence

import pytest
import torch

from dakrun.engine import Lengths, causal_attention


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[L, Hq, D] of the last L of P positions, key by key."""
    group, before = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("lhd,phd->hlp", q.double(), k) * scale
    seen = (
        torch.arange(len(k), device=q.device)
        <= torch.arange(len(q), device=q.device)[:, None] + before
    )
    return torch.einsum("hlp,phd->lhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    ("lengths", "cached"),
    [((7,), 0), ((1, 70, 13), 0), ((33, 33), 0), ((5,), 66), ((66,), 5), ((1,), 128)],
)
def test_lengths(lengths: Sequence[int], cached: int, heads: tuple[int, int], device: str) -> None:
    torch.manual_seed(0)
    dtype, dim, total = torch.float16, 64, sum(lengths)
    qkv = torch.randn(total, heads[0] + 2 * heads[1], dim, device=device).to(dtype)
    q, k, v = qkv.split((heads[0], heads[1], heads[1]), dim=1)
    queries = Lengths.of(lengths, torch.device(device))
    keys = queries
    if cached:
        before = torch.randn(2, cached, heads[1], dim, device=device).to(dtype)
        k, v = (torch.cat(both) for both in zip(before, (k, v), strict=True))
        keys = Lengths.of([cached + lengths[0]], torch.device(device))
    found = causal_attention(q, k, v, queries, keys, scale=0.2)
    parts = zip(q.split(lengths), k.split(keys.each), v.split(keys.each), strict=True)
    wanted = torch.cat([alone(*part, 0.2) for part in parts])
    torch.testing.assert_close(found.double(), wanted, atol=2e-3, rtol=2e-3)
