"""SplitK_FlashAttn compared with its ceilings and torch: `dakrun bench --kernel attention`.

Each case is a CUDA graph of launches with programmatic dependent launch. A launch reads its own
slots, like a layer of a model. A chain has at least four sets of slots of more than 2 GiB in total,
so L2 serves none of them, and repeats them until it takes 4 ms. A time is the graph's time over its
launches: the median of seven replays after seven to warm up. Keys and values are random values in
packed order. Every slot holds one position less than its length; the new token is appended.

The baseline is torch's scaled_dot_product_attention with contiguous keys and values [B, Hkv, L, D]
in HBM, whatever the ratio, which already contain the new token. Slots of different lengths need a
mask, with which torch also reads the padding; only the slots' own positions count as bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.kernels.attention import (
    AttentionWorkspace,
    BlockTables,
    KVShape,
    attention_config,
    splitk_flash_attn,
)
from dakrun.lab.bench.attention_sweep import AttentionCase, AttentionSweep
from dakrun.lab.bench.ceilings import FULL, Effort
from dakrun.lab.bench.kernel import Chains, measure_kernel
from dakrun.lab.bench.output import Record
from dakrun.lab.bench.rows import AttentionRow
from dakrun.lab.bench.tiers import fill_random
from dakrun.lab.probe.chain import Launch, launch_seconds
from dakrun.launches import TierAccess
from dakrun.memory.tiers import aligned

ATTENTION_EFFORT = replace(FULL, min_launches=4)


def measure_attention(
    sweep: AttentionSweep,
    profile: HardwareProfile,
    *,
    effort: Effort = ATTENTION_EFFORT,
    command: str,
    progress: Callable[[str], None],
) -> Record:
    """Measure all cases of `sweep` on torch's current GPU; see measure_kernel.

    Raises CannotRun if memory is short or no kernel supports the GPU.
    """
    return measure_kernel(
        sweep, profile, AttentionChains, effort=effort, command=command, progress=progress
    )


class AttentionChains(Chains):
    """Chains of decode attention over the slots in `buffers`."""

    _filled = False

    def fill(self, case: AttentionCase) -> None:
        """Write normal keys and values, once for all cases."""
        if not self._filled:
            fill_random(self.buffers, self._dtype)
        self._filled = True

    def row(
        self, case: AttentionCase, access: Sequence[TierAccess], **known: float
    ) -> AttentionRow:
        return AttentionRow(case=case, samples_s=self.attention(case, access), **known)

    def attention(self, case: AttentionCase, access: Sequence[TierAccess]) -> list[float]:
        """Times of SplitK_FlashAttn with the case's slots in each tier."""
        slots, dim = case.slots, case.head_dim
        shape = KVShape(slots.kv_heads, dim, slots.length)
        config = attention_config(shape, case.units, access, card=self._card)
        workspace = AttentionWorkspace.empty([config], slots.heads // slots.kv_heads, self.device)
        tables = [BlockTables.of_slots(starts, shape) for starts in self._addresses(case)]
        lengths = torch.tensor(slots.lengths, dtype=torch.int32, device=self.device) - 1
        parts = (slots.heads, slots.kv_heads, slots.kv_heads)
        q, k, v = self._normal(len(lengths), sum(parts), dim).split(parts, dim=1)
        out = torch.empty(len(lengths), slots.heads * dim, dtype=self._dtype, device=self.device)

        def launch(operand: int) -> None:
            splitk_flash_attn(
                q, k, v, tables[operand], lengths, config, workspace, out,
                scale=dim**-0.5, pdl=True,
            )  # fmt: skip

        return self._seconds(case, launch)

    def baseline(self, case: AttentionCase) -> list[float]:
        slots, dim = case.slots, case.head_dim
        size = (slots.batch, slots.kv_heads, slots.length, dim)
        nbytes = torch.Size(size).numel() * self._dtype.itemsize
        local = self.buffers[LOCAL]
        starts = range(0, 2 * case.launches * aligned(nbytes), aligned(nbytes))
        parts = [local[at : at + nbytes].view(self._dtype).view(size) for at in starts]
        keys, values = parts[0::2], parts[1::2]
        q, options = self._sdpa_query(case)

        def launch(operand: int) -> None:
            torch.nn.functional.scaled_dot_product_attention(
                q, keys[operand], values[operand], **options
            )

        return self._seconds(case, launch)

    def _seconds(self, case: AttentionCase, launch: Launch) -> list[float]:
        return launch_seconds(launch, case.launches, replays=self._replays)

    def _sdpa_query(self, case: AttentionCase) -> tuple[torch.Tensor, dict[str, Any]]:
        """Queries for torch, and the options that describe groups and lengths."""
        slots, dim = case.slots, case.head_dim
        group = slots.heads // slots.kv_heads
        if slots.shortest is None:
            return self._normal(slots.batch, slots.heads, 1, dim), {"enable_gqa": group > 1}
        # Not every kernel of torch supports groups and a mask: pass the heads of a group as the
        # positions of one head.
        lengths = torch.tensor(slots.lengths, device=self.device)
        padding = torch.arange(slots.length, device=self.device) >= lengths[:, None, None, None]
        size = (slots.batch, 1, group, slots.length)
        mask = torch.zeros(size, dtype=self._dtype, device=self.device)
        mask.masked_fill_(padding, -torch.inf)
        return self._normal(slots.batch, slots.kv_heads, group, dim), {"attn_mask": mask}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self.device)

    def _addresses(self, case: AttentionCase) -> torch.Tensor:
        """Addresses of each launch's slots, tier by tier: int64 [launches, B]."""
        numbers = (torch.arange(case.launches * count) for count in case.units)
        starts = [
            buffer.data_ptr() + case.unit_bytes * number.view(case.launches, count)
            for buffer, number, count in zip(
                self.buffers.values(), numbers, case.units, strict=True
            )
        ]
        return torch.cat(starts, dim=1).to(self.device)
