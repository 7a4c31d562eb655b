"""Decode attention over packed slots: operands amid NaN, and what ought to come of them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cards import H200

from dakrun.geometry import KV_BLOCK
from dakrun.hardware import Card
from dakrun.kernels import HeadNorms
from dakrun.kernels.attention import (
    AttentionConfig,
    AttentionWorkspace,
    BlockTables,
    KVShape,
    PrefixAttention,
    attention_config,
    kv_blocks,
    list_items,
    splitk_flash_attn,
)
from dakrun.kernels.runtime import held_card
from dakrun.launches import TierAccess

ACCESS = (TierAccess(), TierAccess(sms=2, window_bytes=64 * 1024))


def rotations(positions: int, dim: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines [positions, dim / 2, 2]."""
    angles = torch.arange(positions)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return torch.stack((angles.cos(), angles.sin()), -1).float().to(device)


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x [..., D] rotated as transformers rotates Llama's, by [D / 2, 2]."""
    cos, sin = (turn[:, i].double().repeat(2) for i in range(2))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


@dataclass
class Case:
    """Slots of `lengths` cached positions, whose new token attends; negative: an empty slot.

    All that no request has filled is NaN.
    """

    lengths: Sequence[int]
    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype = torch.float16
    rope: bool = False
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    positions: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.lengths) + self.dim)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        batch, heads = len(self.lengths), self.kv_heads * self.group
        room = self.positions or max(self.lengths) + 1
        self.shape = KVShape(self.kv_heads, self.dim, room)
        self.room = dataclasses.replace(self.shape, positions=self.shape.blocks * KV_BLOCK)
        qkv = normal(batch, (heads + 2 * self.kv_heads) * self.dim).to(self.device)
        parts = qkv.view(batch, -1, self.dim).split((heads, self.kv_heads, self.kv_heads), dim=1)
        self.q, self.k, self.v = parts
        self.cached = [
            (normal(self.kv_heads, max(n, 0), self.dim), normal(self.kv_heads, max(n, 0), self.dim))
            for n in self.lengths
        ]
        self.turns = rotations(self.room.positions, self.dim, self.device) if self.rope else None

    def config(
        self,
        tiers: Sequence[int] = (),
        *,
        sms: int,
        mixed: bool = False,
        reads_spilled: bool = False,
        card: Card | None = None,
    ) -> AttentionConfig:
        """With slots in as many `tiers`, or all in the first; the second may be `mixed` with it.

        For `sms` SMs of the `card`, by default that to which launches are held, or an H200.
        """
        tiers = tiers or (len(self.lengths),)
        access = (ACCESS[0], dataclasses.replace(ACCESS[1], mixed=mixed))
        return attention_config(
            self.shape,
            tiers,
            access[: len(tiers)],
            card=dataclasses.replace(card or held_card() or H200, sms=sms),
            capacity=8,
            reads_spilled=reads_spilled,
        )

    def slots(self) -> list[torch.Tensor]:
        """The packed slots, with NaN behind what is cached."""
        packed = []
        for cached in self.cached:
            full = torch.full((2, self.kv_heads, self.room.positions, self.dim), torch.nan)
            full = full.to(self.dtype)
            for whole, part in zip(full, cached, strict=True):
                whole[:, : part.shape[1]] = part
            packed.append(kv_blocks.pack(full[0], full[1], self.shape).to(self.device))
        return packed

    def run(
        self,
        config: AttentionConfig,
        slots: Sequence[torch.Tensor],
        prefixes: PrefixAttention | None = None,
        spilled: Sequence[int] | None = None,
        head_norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """The output [B, Hq * D]; rows of empty slots stay NaN.

        The first `spilled` blocks of each local slot count as the first remote tier's.
        """
        batch, heads, dim = self.q.shape
        out = torch.full((batch, heads * dim), torch.nan, dtype=self.dtype, device=self.device)
        workspace = AttentionWorkspace.empty([config], self.group, self.device)
        workspace.partials.fill_(torch.nan)
        starts = torch.tensor([slot.data_ptr() for slot in slots], device=self.device)
        tables = BlockTables.of_slots(starts, self.shape)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        leading = None if spilled is None else torch.tensor(spilled).to(lengths)
        list_items(lengths, config, workspace, prefixes=prefixes, spilled=leading)
        splitk_flash_attn(
            self.q, self.k, self.v, tables, lengths, config, workspace, out,
            scale=dim**-0.5, rotations=self.turns, prefixes=prefixes,
            spilled=leading, head_norms=head_norms,
        )  # fmt: skip
        assert not workspace.arrivals.any()
        return out

    def check(self, out: torch.Tensor, slots: Sequence[torch.Tensor], allowed: float) -> None:
        """Outputs against float64, and the slots: the new token appended, all else as it was."""
        for number, (length, slot) in enumerate(zip(self.lengths, slots, strict=True)):
            if length < 0:
                assert out[number].isnan().all()
                continue
            q, k, v = (part[number].cpu().double() for part in (self.q, self.k, self.v))
            if self.turns is not None:
                q, k = (rotated(part, self.turns[length].cpu()) for part in (q, k))
            keys, values = (
                torch.cat((old.double(), new[:, None]), 1)
                for old, new in zip(self.cached[number], (k, v), strict=True)
            )
            exact = torch.nn.functional.scaled_dot_product_attention(
                q.view(self.kv_heads, self.group, self.dim), keys, values
            ).flatten()
            found = out[number].cpu().double()
            assert (found - exact).norm() <= allowed * exact.norm(), (number, length)
            kept = [part.double() for part in kv_blocks.unpack(slot.cpu(), self.dtype, self.room)]
            for part, wanted in zip(kept, (keys, values), strict=True):
                assert torch.equal(part[:, :length], wanted[:, :length])
                error = (part[:, length] - wanted[:, length]).norm()
                assert error <= allowed * wanted[:, length].norm()
                assert part[:, length + 1 :].isnan().all()
