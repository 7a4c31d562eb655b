"""Prompt attention over scattered KV blocks: operands amid NaN, and the exact results."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dakrun.geometry import KV_BLOCK
from dakrun.kernels.attention import (
    BlockTables,
    KVShape,
    PromptSegment,
    PromptWork,
    kv_blocks,
    prompt_attn,
)
from dakrun.units import ceil_div

LAYERS, LAYER = 2, 1


@dataclass
class PromptCase:
    """Segments of (start, length), each in a slot of its own, whose blocks lie in random order.

    All that no request has filled is NaN, and so are rows of q between segments.
    """

    segments: Sequence[tuple[int, int]]
    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype = torch.float16
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(map(sum, self.segments)) + self.dim)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        heads = self.kv_heads * self.group
        self.starts, rows = [], 1
        for _, length in self.segments:
            self.starts.append(rows)
            rows += length + 1
        fused = torch.full((rows, heads + 2 * self.kv_heads, self.dim), torch.nan)
        self.qkv = fused.to(self.dtype)
        self.caches = []
        for row, (start, length) in zip(self.starts, self.segments, strict=True):
            self.qkv[row : row + length, :heads] = normal(length, heads, self.dim)
            shape = (self.kv_heads, start + length, self.dim)
            self.caches.append((normal(*shape), normal(*shape)))
        self.qkv = self.qkv.to(self.device)
        self.blocks, self.tables = self._blocks(generator)

    def work(self, order: Sequence[int] = ()) -> PromptWork:
        """The work of the segments of these numbers, or of all."""
        segments = [
            PromptSegment(self.starts[i], i, *self.segments[i])
            for i in order or range(len(self.segments))
        ]
        return PromptWork.of(
            segments, kv_heads=self.kv_heads, group=self.group, head_dim=self.dim,
            device=self.device,
        )  # fmt: skip

    def run(self, work: PromptWork | None = None) -> torch.Tensor:
        """The output [T, Hq * D]; rows without a segment stay NaN."""
        heads = self.kv_heads * self.group
        work = work or self.work()
        work.partials.fill_(torch.nan)
        out = torch.full((len(self.qkv), heads * self.dim), torch.nan).to(self.dtype)
        out = out.to(self.device)
        prompt_attn(self.qkv[:, :heads], self.tables, work, out, layer=LAYER, scale=self.dim**-0.5)
        assert not work.arrivals.any()
        return out

    def check(self, out: torch.Tensor, allowed: float) -> None:
        """Outputs against float64, row by row."""
        heads = self.kv_heads * self.group
        others = torch.ones(len(out), dtype=torch.bool)
        for row, (start, length), cache in zip(
            self.starts, self.segments, self.caches, strict=True
        ):
            others[row : row + length] = False
            q = self.qkv[row : row + length, :heads].cpu().double().transpose(0, 1)
            keys, values = (part.double().repeat_interleave(self.group, 0) for part in cache)
            seen = torch.ones(length, start + length, dtype=torch.bool).tril(start)
            exact = torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=seen
            )
            found = out[row : row + length].cpu().double().view(length, heads, self.dim)
            error = (found.transpose(0, 1) - exact).norm(dim=-1)
            assert (error <= allowed * exact.norm(dim=-1)).all(), (start, length, error.max())
        assert out.cpu()[others].isnan().all()

    def _blocks(self, generator: torch.Generator) -> tuple[torch.Tensor, BlockTables]:
        """KV blocks [n, layers, bytes], and the block table of each segment's slot."""
        shape = KVShape(self.kv_heads, self.dim, KV_BLOCK)
        counts = [ceil_div(start + length, KV_BLOCK) for start, length in self.segments]
        order = torch.randperm(sum(counts), generator=generator).tolist()
        blocks = torch.full((sum(counts), LAYERS, shape.layer_bytes), 0xFF, dtype=torch.uint8)
        addresses = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        places = []
        for slot, (count, cache) in enumerate(zip(counts, self.caches, strict=True)):
            full = torch.full((2, self.kv_heads, count * KV_BLOCK, self.dim), torch.nan)
            full = full.to(self.dtype)
            for whole, part in zip(full, cache, strict=True):
                whole[:, : part.shape[1]] = part
            for number in range(count):
                part = full[:, :, number * KV_BLOCK : (number + 1) * KV_BLOCK]
                place = order.pop()
                blocks[place, LAYER] = kv_blocks.pack(part[0], part[1], shape)
                places.append((slot, number, place))
        blocks = blocks.to(self.device)
        for slot, number, place in places:
            addresses[slot, number] = blocks[place].data_ptr()
        tables = BlockTables(addresses.to(self.device), shape.head_bytes, shape.layer_bytes)
        return blocks, tables
