"""The loop over the cases of a kernel: ceilings first, then each case beside its baseline.

Knows the parts that all kernels share; gemm.py and attention.py launch them.
"""

import itertools
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dakrun.engine import direct_accesses
from dakrun.hardware import LOCAL, Card, HardwareProfile
from dakrun.kernels.runtime import card_of
from dakrun.lab.bench.attention_sweep import AttentionSweep
from dakrun.lab.bench.ceilings import Effort
from dakrun.lab.bench.gemm_sweep import GemmSweep
from dakrun.lab.bench.output import Record, head
from dakrun.lab.bench.rows import Row, columns
from dakrun.lab.bench.sweep import forecast
from dakrun.lab.bench.tiers import measure_ceilings, operands
from dakrun.launches import TierAccess


class Chains(ABC):
    """Chains of launches of one kernel over operands in `buffers`, and of its baseline.

    `buffers` are uint8 [bytes] by tier, HBM first, and hold operands of `dtype`. Times are seconds
    of one launch, one for each of `replays` replays.
    """

    def __init__(
        self, buffers: dict[str, torch.Tensor], dtype: torch.dtype, card: Card, replays: int
    ) -> None:
        self.buffers = buffers
        self.device = buffers[LOCAL].device
        self._dtype, self._card, self._replays = dtype, card, replays

    @abstractmethod
    def fill(self, case: Any) -> None:
        """Write random operands for `case` into all buffers."""

    @abstractmethod
    def baseline(self, case: Any) -> list[float]:
        """Times of torch's kernel with the case's operands contiguous in HBM."""

    @abstractmethod
    def row(self, case: Any, access: Sequence[TierAccess], **known: float) -> Row:
        """Measure `case` with tiers read as `access` says; `known` are the row's other times."""


def measure_kernel(
    sweep: GemmSweep | AttentionSweep,
    profile: HardwareProfile,
    new_chains: Callable[[dict[str, torch.Tensor], torch.dtype, Card, int], Chains],
    *,
    effort: Effort,
    command: str,
    progress: Callable[[str], None],
) -> Record:
    """Measure the ceilings and then all cases of `sweep` on torch's current GPU.

    `profile` gives the predictions and the SMs and window for the remote tier; `new_chains` is the
    constructor of a Chains. Cases that differ in their ratio alone share one baseline measurement.
    Raises CannotRun if memory is short.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    profile = profile.on(card)
    ceilings = measure_ceilings(sweep.remote_tiers(profile), effort, device)
    _, *remote = ceilings.rates
    cases = list(sweep.cases(ceilings.turning_point, effort, tiers=len(ceilings.rates)))
    rows: list[Row] = []
    with operands(cases, sweep.operand, ceilings.rates, device, progress) as buffers:
        chains = new_chains(buffers, getattr(torch, sweep.dtype), card, effort.replays)
        for label, group in itertools.groupby(cases, key=lambda case: case.label):
            first, *others = group
            chains.fill(first)
            baseline_s = statistics.median(chains.baseline(first))
            for case in (first, *others):
                expected = forecast(case, sweep.dtype, profile, remote)
                row = chains.row(
                    case,
                    [TierAccess(), *direct_accesses(profile, remote, expected.sms[1:], card)],
                    bound_s=ceilings.seconds(case.tier_bytes),
                    predicted_s=expected.seconds,
                    baseline_s=baseline_s,
                )
                progress(f"{label} {row.summary}")
                rows.append(row)
    return Record(
        head=head({"kernel": sweep.kernel}, sweep.dtype, ceilings, profile, command),
        columns=columns(sweep),
        rows=tuple(row.figures() for row in rows),
    )
