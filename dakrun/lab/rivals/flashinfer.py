"""FlashInfer's attention of the benchmarks' cases: decode over pages, and prompts."""

import itertools
from collections.abc import Sequence

import torch

from dakrun.lab.cases import Prompts, Slots
from dakrun.lab.chain import Launch
from dakrun.units import ceil_div

PAGE = 16  # positions
WORKSPACE_BYTES = 2**27


def pages(slots: Slots) -> tuple[int, ...]:
    """The shape of the pages of all slots: [pages, keys and values, PAGE, Hkv, D]."""
    return sum(_counts(slots)), 2, PAGE, slots.kv_heads, slots.head_dim


def decode(slots: Slots, caches: Sequence[torch.Tensor], q: torch.Tensor) -> Launch:
    """Launches of decode attention of q [B, H, D] to one of `caches`, each of the shape pages().

    Tensor cores multiply, which is faster with several query heads for each KV head.
    """
    import flashinfer

    counts = _counts(slots)
    ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=q.device)
    filled = [n - PAGE * (count - 1) for n, count in zip(slots.lengths, counts, strict=True)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(q), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        ends, torch.arange(sum(counts), dtype=torch.int32, device=q.device),
        torch.tensor(filled, dtype=torch.int32, device=q.device), slots.heads, slots.kv_heads,
        slots.head_dim, PAGE, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda number: wrapper.run(q, caches[number])


def prefill(prompts: Prompts, parts: Sequence[torch.Tensor], q: torch.Tensor) -> Launch:
    """Launches of causal attention of q [B S, H, D] to two of `parts`, keys and values like it."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q), "NHD")
    ends = torch.arange(prompts.batch + 1, dtype=torch.int32, device=q.device) * prompts.length
    wrapper.plan(
        ends, ends, prompts.heads, prompts.kv_heads, prompts.head_dim, causal=True,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda number: wrapper.run(q, *parts[2 * number : 2 * number + 2])


def _counts(slots: Slots) -> list[int]:
    """Pages of each slot."""
    return [ceil_div(length, PAGE) for length in slots.lengths]


def _workspace(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
