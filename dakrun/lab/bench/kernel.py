"""The loop over the cases of a kernel: ceilings first, then each case beside its baseline.

Also chains in rooms of buffers, which dakrun evaluate measures one by one.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dakrun.engine import direct_accesses
from dakrun.hardware import Card, HardwareProfile
from dakrun.kernels.runtime import card_of
from dakrun.lab.bench.kernel_sweep import KernelSweep, kernel_row
from dakrun.lab.cases import Case, Weight, buffer_bytes, forecast
from dakrun.lab.ceilings import FULL, Effort
from dakrun.lab.chains import CHAINS, AttentionChains, Chains, GemmChains
from dakrun.lab.memory import Room, measure_ceilings
from dakrun.lab.output import Record, head
from dakrun.launches import TierAccess
from dakrun.memory.tiers import ALIGNMENT
from dakrun.plan import is_windowed
from dakrun.units import format_bytes, format_seconds


def measure_kernel(
    sweep: KernelSweep, profile: HardwareProfile, *, effort: Effort = FULL, command: str,
    progress: Callable[[str], None],
) -> Record:  # fmt: skip
    """Measure the ceilings and then all cases of `sweep` on torch's current GPU.

    A time is the median of all replays. `profile` gives the predictions and the SMs and window for
    the remote tier. Cases that differ in their ratio alone share one baseline measurement. Raises
    CannotRun if memory is short or no kernel supports the GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    profile = profile.on(card)
    remote = sweep.remote_tiers(profile)
    ceilings = measure_ceilings(remote, effort, device)
    cases = list(sweep.cases(ceilings.turning_point, effort, tiers=len(ceilings.rates)))
    sizes = dict(zip(ceilings.rates, buffer_bytes(cases, ALIGNMENT), strict=True))
    operand, rows = cases[0].operand, list[dict[str, Any]]()
    progress(
        f"measuring {len(cases)} cases with {format_bytes(sum(sizes.values()))} of {operand.stored}"
    )
    with Room(device) as room:
        dtype = getattr(torch, sweep.dtype)
        chains = CHAINS[type(operand)](room.at_least(sizes), dtype, card, effort.replays)
        if isinstance(chains, GemmChains):
            counts = dict.fromkeys(of.n for of in sweep.operands if isinstance(of, Weight))
            chains.compile(list(counts), mixes=not windowed(remote, card))
        for label, group in itertools.groupby(cases, key=lambda case: case.operand.label):
            first, *others = group
            chains.fill(first.operand)
            baseline_s = statistics.median(chains.baseline(first))
            rival_s = None
            if sweep.rival and isinstance(chains, AttentionChains):
                rival_s = statistics.median(chains.rival(first))
            for case in (first, *others):
                predicted_s, access = accesses(case, profile, list(ceilings.rates)[1:], card)
                samples, by = chains.kernel(case, access)
                more = _without(chains, case, access, card) if sweep.ablations else {}
                if rival_s is not None:
                    more |= {"rival_s": rival_s}
                rows.append(kernel_row(
                    case, samples, by, bound_s=ceilings.seconds(case.tier_bytes),
                    predicted_s=predicted_s, baseline_s=baseline_s, **more,
                ))  # fmt: skip
                row = rows[-1]
                rate = f"{row['bound_over_time']:.1%} of the ceiling"
                if "flops_per_s" in row:
                    rate = f"{row['flops_per_s'] / 1e12:,.0f} TFLOPS"
                time = format_seconds(row["time_s"])
                progress(f"{label} {case.ratio:.2%} remote: {time}, {rate}")
    subject = {"kernel": operand.kernel}
    return Record(
        head=head(subject, sweep.dtype, ceilings, profile, command),
        columns=sweep.columns,
        rows=tuple(rows),
    )


def _without(
    chains: Chains, case: Case, access: Sequence[TierAccess], card: Card
) -> dict[str, float | None]:
    """Times without two techniques.

    Without the congestion window, where remote units are read, there are as many stages as shared
    memory holds; without wave alignment groups of row blocks are largest, so that waves are uneven.
    """
    window_off_s = None
    if case.ratio:
        deep = [replace(tier, window_bytes=None) for tier in access]
        window_off_s = statistics.median(chains.kernel(case, deep)[0])
    uneven, _ = chains.kernel(case, access, replace(card, even_waves=False))
    return {"window_off_s": window_off_s, "alignment_off_s": statistics.median(uneven)}


def accesses(
    case: Case, profile: HardwareProfile, remote: Sequence[str], card: Card
) -> tuple[float, list[TierAccess]]:
    """The predicted seconds of `case`, and how its kernel reads the tiers: as in a plan."""
    expected = forecast(case, profile, remote)
    return expected.seconds, [
        TierAccess(),
        *direct_accesses(profile, remote, expected.sms[1:], card),
    ]


def windowed(remote: Sequence[Any], card: Card) -> bool:
    """Whether all links of the `remote` tiers have a window on `card`."""
    return all(is_windowed(tier, card) for tier in remote)
