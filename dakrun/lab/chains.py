"""Chains of launches of the kernels, and of torch's, over operands in tiers: seconds of a launch.

Each case is a CUDA graph of launches with programmatic dependent launch. Every launch reads its own
operand, as layers of a model do. Operands have more than 2 GiB in total, so L2 serves none of them,
and a chain repeats its launches until it takes 4 ms. A time is the graph's time over its launches.
Each replay gives one time, after as many replays to warm up. Operands are random values in packed
order; their remote parts lie in page-locked host memory or in a peer GPU's memory. The baseline is
torch's kernel with all operands dense in HBM, whatever the ratio.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dakrun.formats import PACKED16
from dakrun.hardware import LOCAL, Card
from dakrun.kernels.attention import (
    AttentionWorkspace,
    BlockTables,
    KVShape,
    PromptSegment,
    PromptWork,
    attention_config,
    prompt_attn,
    splitk_flash_attn,
)
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import architecture, compile_ahead
from dakrun.lab.cases import Case, Operand, Prompts, Slots, Weight
from dakrun.lab.chain import Launch, launch_seconds, seconds_round_robin
from dakrun.lab.memory import Buffers, fill_random
from dakrun.launches import TierAccess, split_row_blocks
from dakrun.memory.matrix import MatrixPart, TieredMatrix
from dakrun.memory.tiers import aligned

# Multiply(i, x, out) multiplies x [N, K] by weight number i into out [N, M].
Multiply = Callable[[int, torch.Tensor, torch.Tensor], object]


@dataclass
class Chains(ABC):
    """Chains over operands of `dtype` in `buffers`; times are seconds of a launch, by replay."""

    buffers: Buffers
    dtype: torch.dtype
    card: Card
    replays: int

    @property
    def device(self) -> torch.device:
        return self.buffers[LOCAL].device

    _scale = 0.0  # of the values in the buffers

    def fill(self, operand: Operand) -> None:
        """Write normal values of the operand's scale into all buffers."""
        if operand.scale != self._scale:
            self._scale = operand.scale
            fill_random(self.buffers, self.dtype, scale=operand.scale)

    @abstractmethod
    def kernel(
        self, case: Case, access: Sequence[TierAccess], layout: Card | None = None
    ) -> tuple[list[float], str]:
        """Times with the case's units in each tier, and the name of the kernel.

        Row blocks are laid out for the card `layout`, if given.
        """

    @abstractmethod
    def baseline(self, case: Case) -> list[float]:
        """Times of torch's kernel with the case's operands contiguous in HBM."""

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def dense(self, case: Case, size: Sequence[int], each: int = 1) -> list[torch.Tensor]:
        """Tensors of `size` one after the other in HBM: `each` for every launch."""
        nbytes = torch.Size(size).numel() * self.dtype.itemsize
        starts = range(0, each * case.launches * aligned(nbytes), aligned(nbytes))
        local = self.buffers[LOCAL]
        return [local[at : at + nbytes].view(self.dtype).view(*size) for at in starts]

    def seconds(self, case: Case, launch: Launch) -> list[float]:
        return launch_seconds(launch, case.launches, replays=self.replays)


class GemmChains(Chains):
    """Products X W^T by the kernel that the engine uses for that many rows of X.

    A launch also reads the output of the launch before it (two buffers alternate), and may prefetch
    the next launch's weight into L2, as decode steps do; that is one of at least eight.
    """

    def compile(self, rows: Sequence[int], *, mixes: bool) -> None:
        """Compile the kernels for so many rows side by side."""
        variants = Products(self.device, self.card).variants(rows, self.dtype, mixes=mixes)
        compile_ahead(variants, architecture(self.device.index))

    def kernel(
        self, case: Case, access: Sequence[TierAccess], layout: Card | None = None
    ) -> tuple[list[float], str]:
        multiply, by = self._multiply(case, access, layout)
        return self.products(case, multiply), by

    def in_turns(self, cases: Sequence[tuple[Case, Sequence[TierAccess]]]) -> list[list[float]]:
        """Times of each case by round; a round replays the chain of every case once."""
        chains = [
            (self._step(case, self._multiply(case, access)[0]), case.launches)
            for case, access in cases
        ]
        return seconds_round_robin(chains, replays=self.replays, load=False)

    def _multiply(
        self, case: Case, access: Sequence[TierAccess], layout: Card | None = None
    ) -> tuple[Multiply, str]:
        """The product by the weights in the buffers, and the name of its kernel."""
        weight, products = case.operand, Products(self.device, self.card)
        assert isinstance(weight, Weight)
        splits = split_row_blocks(case.units, access, card=layout or self.card)

        def part(tier: str, number: int, index: int) -> MatrixPart:
            size = case.tier_bytes[index]
            held = self.buffers[tier][number * size : (number + 1) * size]
            return MatrixPart(tier, splits[index], PACKED16, (held,))

        weights = [
            TieredMatrix(
                (weight.rows, weight.cols),
                self.dtype,
                tuple(part(tier, number, index) for index, tier in enumerate(self.buffers)),
            )
            for number in range(case.launches)
        ]

        def multiply(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
            ahead = products.ahead(weight.n, weights[(number + 1) % case.launches], access)
            products(x, weights[number], access, out, pdl=True, ahead=ahead)

        return multiply, products.kernel_for(weight.n, weights[0])

    def baseline(self, case: Case) -> list[float]:
        """cuBLAS."""
        weights = self.dense(case, (case.operand.rows, case.operand.cols))  # type: ignore[union-attr]

        def multiply(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
            torch.mm(x, weights[number].t(), out=out)

        return self.products(case, multiply)

    def products(self, case: Case, multiply: Multiply) -> list[float]:
        """Times of a chain of products."""
        return self.seconds(case, self._step(case, multiply))

    def _step(self, case: Case, multiply: Multiply) -> Launch:
        """A launch of a chain, which reads the output of the one before.

        The first weight's launch reads random numbers instead: over the whole chain, products of
        products would vanish or overflow. Where M < K, the rest of the next input keeps its first
        random numbers.
        """
        weight = case.operand
        assert isinstance(weight, Weight)
        n, rows, cols = weight.n, weight.rows, weight.cols
        start, *ends = (self.normal(n * max(rows, cols)) for _ in range(3))
        xs = [end[: n * cols].view(n, cols) for end in (start, *ends)]
        outs = [end[: n * rows].view(n, rows) for end in ends]

        def step(number: int) -> None:
            x = xs[number % 2 + 1] if number else xs[0]
            multiply(number, x, outs[(number + 1) % 2])

        return step


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
        workspace = AttentionWorkspace.empty([config], slots.heads // slots.kv_heads, self.device)
        tables = [BlockTables.of_slots(starts, shape) for starts in self._addresses(case)]
        lengths = torch.tensor(slots.lengths, dtype=torch.int32, device=self.device) - 1
        parts = (slots.heads, slots.kv_heads, slots.kv_heads)
        q, k, v = self.normal(slots.batch, sum(parts), slots.head_dim).split(parts, dim=1)
        out = torch.empty(
            slots.batch, slots.heads * slots.head_dim, dtype=self.dtype, device=self.device
        )

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


CHAINS: dict[type[Operand], type[Chains]] = {
    Weight: GemmChains,
    Slots: AttentionChains,
    Prompts: PromptChains,
}
