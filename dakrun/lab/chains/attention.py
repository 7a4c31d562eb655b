"""Chains of decode and prompt attention over slots in tiers, and of torch's and FlashInfer's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dakrun.hardware import Card
from dakrun.kernels.attention import (
    AttentionWorkspace,
    BlockTables,
    KVShape,
    PromptSegment,
    PromptWork,
    attention_config,
    list_items,
    prompt_attn,
    splitk_flash_attn,
)
from dakrun.lab.cases import Case, Prompts, Slots
from dakrun.lab.chains.base import Chains
from dakrun.launches import TierAccess


class AttentionChains(Chains):
    """Decode attention. Every slot holds one position less than its length: the new token is added.

    The baseline is torch's scaled_dot_product_attention with contiguous keys and values [B, Hkv, L,
    D], which already contain the new token. Slots of different lengths need a mask, with which
    torch also reads the padding; only the slots' own positions count as bytes.
    """

    def kernel(
        self, case: Case, access: Sequence[TierAccess], layout: Card | None = None
    ) -> tuple[list[float], str]:
        slots = case.operand
        assert isinstance(slots, Slots)
        shape = KVShape(slots.kv_heads, slots.head_dim, slots.length)
        config = attention_config(shape, case.units, access, card=self.card)
        group = slots.heads // slots.kv_heads
        workspace = AttentionWorkspace.empty([config], group, self.device)
        tables = [BlockTables.of_slots(starts, shape) for starts in self._addresses(case)]
        lengths = torch.tensor(slots.lengths, dtype=torch.int32, device=self.device) - 1
        parts = (slots.heads, slots.kv_heads, slots.kv_heads)
        q, k, v = self.normal(slots.batch, sum(parts), slots.head_dim).split(parts, dim=1)
        out = torch.empty(
            slots.batch, slots.heads * slots.head_dim, dtype=self.dtype, device=self.device
        )

        list_items(lengths, config, workspace)
        if self.device.type == "cuda":  # a launch reads the list before its PDL wait
            torch.cuda.synchronize(self.device)

        def launch(number: int) -> None:
            splitk_flash_attn(
                q, k, v, tables[number], lengths, config, workspace, out,
                scale=slots.head_dim**-0.5, pdl=True,
            )  # fmt: skip

        return self.seconds(case, launch), "splitk"

    def baseline(self, case: Case) -> list[float]:
        slots = case.operand
        assert isinstance(slots, Slots)
        size = (slots.batch, slots.kv_heads, slots.length, slots.head_dim)
        parts = self.dense(case, size, each=2)
        q, options = self._query(slots)

        def launch(number: int) -> None:
            keys, values = parts[2 * number : 2 * number + 2]
            torch.nn.functional.scaled_dot_product_attention(q, keys, values, **options)

        return self.seconds(case, launch)

    def rival(self, case: Case) -> list[float]:
        """Times of FlashInfer's kernel with the case's operands in pages in HBM."""
        from dakrun.lab.rivals import flashinfer

        slots = case.operand
        assert isinstance(slots, Slots)
        pages = self.dense(case, flashinfer.pages(slots))
        q = self.normal(slots.batch, slots.heads, slots.head_dim)
        return self.seconds(case, flashinfer.decode(slots, pages, q))

    def _query(self, slots: Slots) -> tuple[torch.Tensor, dict[str, Any]]:
        """Queries for torch, and the options that describe groups and lengths."""
        group, dim = slots.heads // slots.kv_heads, slots.head_dim
        if slots.shortest is None:
            return self.normal(slots.batch, slots.heads, 1, dim), {"enable_gqa": group > 1}
        # Not every kernel of torch supports groups and a mask: pass the heads of a group as the
        # positions of one head.
        lengths = torch.tensor(slots.lengths, device=self.device)
        padding = torch.arange(slots.length, device=self.device) >= lengths[:, None, None, None]
        size = (slots.batch, 1, group, slots.length)
        mask = torch.zeros(size, dtype=self.dtype, device=self.device)
        mask.masked_fill_(padding, -torch.inf)
        return self.normal(slots.batch, slots.kv_heads, group, dim), {"attn_mask": mask}

    def _addresses(self, case: Case) -> torch.Tensor:
        """Addresses of each launch's slots, tier by tier: int64 [launches, B]."""
        nbytes = case.operand.unit_bytes(case.dtype)
        starts = [
            buffer.data_ptr()
            + nbytes * torch.arange(case.launches * count).view(case.launches, count)
            for buffer, count in zip(self.buffers.values(), case.units, strict=True)
        ]
        return torch.cat(starts, dim=1).to(self.device)


class PromptChains(AttentionChains):
    """Prompt attention. Keys and values of all tokens are in KV blocks already.

    The baseline is torch's FlashAttention with queries [B, H, S, D], and keys and values like them.
    """

    def kernel(
        self, case: Case, access: Sequence[TierAccess], layout: Card | None = None
    ) -> tuple[list[float], str]:
        del access, layout  # one CTA on each SM reads all tiers
        of = _prompts(case)
        shape = KVShape(of.kv_heads, of.head_dim, of.length)
        tables = [BlockTables.of_slots(starts, shape) for starts in self._addresses(case)]
        work = PromptWork.of(
            [PromptSegment(of.length * i, i, 0, of.length) for i in range(of.batch)],
            kv_heads=of.kv_heads, group=of.heads // of.kv_heads, head_dim=of.head_dim,
            device=self.device,
        )  # fmt: skip
        q = self.normal(of.batch * of.length, of.heads, of.head_dim)
        out = torch.empty_like(q).flatten(1)

        def launch(number: int) -> None:
            prompt_attn(q, tables[number], work, out, scale=of.head_dim**-0.5, pdl=True)

        return self.seconds(case, launch), "prompt"

    def baseline(self, case: Case) -> list[float]:
        of = _prompts(case)
        parts = self.dense(case, (of.batch, of.kv_heads, of.length, of.head_dim), each=2)
        q = self.normal(of.batch, of.heads, of.length, of.head_dim)
        attend, gqa = torch.nn.functional.scaled_dot_product_attention, of.heads > of.kv_heads

        def launch(number: int) -> None:
            keys, values = parts[2 * number : 2 * number + 2]
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                attend(q, keys, values, is_causal=True, enable_gqa=gqa)

        return self.seconds(case, launch)

    def rival(self, case: Case) -> list[float]:
        from dakrun.lab.rivals import flashinfer

        of = _prompts(case)
        tokens = of.batch * of.length
        parts = self.dense(case, (tokens, of.kv_heads, of.head_dim), each=2)
        q = self.normal(tokens, of.heads, of.head_dim)
        return self.seconds(case, flashinfer.prefill(of, parts, q))


def _prompts(case: Case) -> Prompts:
    assert isinstance(case.operand, Prompts)
    return case.operand
