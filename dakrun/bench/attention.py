"""SplitK_FlashAttn beside its ceilings and torch: `dakrun bench --kernel attention`.

The ceilings come first, in the same process, as in gemm.py. Then a CUDA graph is made for every
case: a chain of launches with programmatic dependent launch, each of which reads a set of slots of
its own, as the layers of a model do. There are four sets at least, of more than 2 GiB in all, so L2
does not help; the chain goes through them as often as takes 4 ms. A time is the graph's over its
launches: the median of seven replays, after as many to warm up. Keys and values are random: packing
is a permutation, so random values are packed ones, too. Every slot holds one position less than its
length, and the new token is the last.

torch's scaled_dot_product_attention does the same with keys and values [B, Hkv, L, D], contiguous,
all of them in HBM whatever the ratio and with the new token among them, which it need not append.
Where slots differ in length it is given a mask, and so reads what no slot needs, too; the bytes
that count are those of the slots' own positions.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dakrun.bench.attention_cases import AttentionCase, attention_cases
from dakrun.bench.attention_rows import ATTENTION_COLUMNS, AttentionRow
from dakrun.bench.attention_sweep import AttentionSweep
from dakrun.bench.cases import forecast
from dakrun.bench.ceilings import Ceilings
from dakrun.bench.effort import FULL, Effort
from dakrun.bench.header import head
from dakrun.bench.output import Record
from dakrun.bench.tiers import fill_random, measure_ceilings, operands
from dakrun.engine.accesses import direct_accesses
from dakrun.hardware.profile import LOCAL, HardwareProfile
from dakrun.kernels.attention.config import AttentionConfig, attention_config
from dakrun.kernels.attention.kv_blocks import KVShape
from dakrun.kernels.attention.splitk import Workspace, splitk_flash_attn
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.memory.tiers import aligned
from dakrun.probe.chain import Launch, launch_seconds

EFFORT = replace(FULL, least_launches=4)


def measure_attention(
    sweep: AttentionSweep,
    profile: HardwareProfile,
    *,
    effort: Effort = EFFORT,
    command: str,
    note: Callable[[str], None],
) -> Record:
    """Measure all cases of `sweep` on torch's current GPU; `note` is told of each.

    `profile` predicts, and says how the remote tier is read; `command` is kept in the record.
    Raises CannotRun where there is no memory for it, or no kernel for the GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    ceilings = measure_ceilings(sweep.remote_tiers(profile), effort, device)
    tiers = len(ceilings.rates)
    cases = list(attention_cases(sweep, ceilings.turning_point, effort, tiers=tiers))
    rows = []
    with operands(cases, "KV", ceilings.rates, device, note) as buffers:
        chains = Chains(buffers, getattr(torch, sweep.dtype), sms, effort.replays)
        chains.fill()
        for row in _rows(sweep, cases, profile, ceilings, chains):
            note(f"{row.case.slots} {row.summary}")
            rows.append(row.figures())
    return Record(
        head=head({"kernel": "attention"}, sweep.dtype, ceilings, profile, command),
        columns=ATTENTION_COLUMNS,
        rows=tuple(rows),
    )


def _rows(
    sweep: AttentionSweep,
    cases: Sequence[AttentionCase],
    profile: HardwareProfile,
    ceilings: Ceilings,
    chains: "Chains",
) -> Iterator[AttentionRow]:
    """All cases; torch is measured once for those that differ in their ratio alone."""
    remote = tuple(ceilings.rates)[1:]
    for _, group in itertools.groupby(cases, key=lambda case: case.slots):
        alike = list(group)
        sdpa_s = statistics.median(chains.sdpa(alike[0]))
        for case in alike:
            expected = forecast(case, case.op(sweep.dtype), sweep.dtype, profile, remote)
            access = [TierAccess(), *direct_accesses(profile, remote, expected.sms[1:])]
            yield AttentionRow(
                case=case,
                samples_s=chains.splitk(case, access),
                bound_s=ceilings.seconds(case.tier_bytes),
                predicted_s=expected.seconds,
                rival_s=sdpa_s,
            )


class Chains:
    """Chains of launches over the slots in `buffers`: uint8, 1-D, by tier, HBM first.

    Times are seconds of one launch, replay by replay.
    """

    def __init__(
        self, buffers: dict[str, torch.Tensor], dtype: torch.dtype, sms: int, replays: int
    ) -> None:
        self.buffers = buffers
        self._dtype, self._sms, self._replays = dtype, sms, replays
        self._device = buffers[LOCAL].device

    def fill(self) -> None:
        """Put random keys and values into all buffers."""
        fill_random(self.buffers, self._dtype)

    def splitk(self, case: AttentionCase, access: Sequence[TierAccess]) -> list[float]:
        """SplitK_FlashAttn with the case's slots in each tier, read as `access` says."""
        launch = self._launch(case, self._config(case, access))
        return launch_seconds(launch, case.launches, replays=self._replays)

    def _config(self, case: AttentionCase, access: Sequence[TierAccess]) -> AttentionConfig:
        shape = KVShape(case.slots.kv_heads, case.head_dim, case.slots.length)
        return attention_config(shape, case.units, access, sms=self._sms)

    def _launch(self, case: AttentionCase, config: AttentionConfig) -> Launch:
        slots, dim = case.slots, case.head_dim
        workspace = Workspace.empty(config, slots.heads // slots.kv_heads, self._device)
        caches = self._addresses(case)
        lengths = torch.tensor(slots.lengths, dtype=torch.int32, device=self._device) - 1
        parts = (slots.heads, slots.kv_heads, slots.kv_heads)
        q, k, v = self._normal(len(lengths), sum(parts), dim).split(parts, dim=1)
        out = torch.empty(len(lengths), slots.heads * dim, dtype=self._dtype, device=self._device)

        def launch(operand: int) -> None:
            splitk_flash_attn(
                q, k, v, caches[operand], lengths, config, workspace, out,
                scale=dim**-0.5, pdl=True,
            )  # fmt: skip

        return launch

    def sdpa(self, case: AttentionCase) -> list[float]:
        """torch with the case's keys and values contiguous and all in HBM."""
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

        return launch_seconds(launch, case.launches, replays=self._replays)

    def _sdpa_query(self, case: AttentionCase) -> tuple[torch.Tensor, dict[str, Any]]:
        """Queries, and how the lengths are told."""
        slots, dim = case.slots, case.head_dim
        group = slots.heads // slots.kv_heads
        if slots.shortest is None:
            return self._normal(slots.batch, slots.heads, 1, dim), {"enable_gqa": group > 1}
        # Not every kernel of torch takes both groups and masks: a group's heads become positions.
        lengths = torch.tensor(slots.lengths, device=self._device)
        behind = torch.arange(slots.length, device=self._device) >= lengths[:, None, None, None]
        size = (slots.batch, 1, group, slots.length)
        mask = torch.zeros(size, dtype=self._dtype, device=self._device)
        mask.masked_fill_(behind, -torch.inf)
        return self._normal(slots.batch, slots.kv_heads, group, dim), {"attn_mask": mask}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _addresses(self, case: AttentionCase) -> torch.Tensor:
        """Where the slots of each launch lie, in the order of the tiers: int64 [launches, B]."""
        numbers = (torch.arange(case.launches * count) for count in case.units)
        starts = [
            buffer.data_ptr() + case.unit_bytes * number.view(case.launches, count)
            for buffer, number, count in zip(
                self.buffers.values(), numbers, case.units, strict=True
            )
        ]
        return torch.cat(starts, dim=1).to(self._device)
