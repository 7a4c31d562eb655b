"""From the options of `dakrun bench` to records: the choice of sweep, the loop over kernel cases.

Knows the parts that all kernels share; gemm.py and attention.py launch the kernels, model.py runs
models. torch is imported when measuring starts.
"""

import itertools
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dakrun.bench.attention_sweep import AttentionSweep, attention_sweep
from dakrun.bench.ceilings import Effort
from dakrun.bench.gemm_sweep import GemmSweep, gemm_sweep
from dakrun.bench.model_sweep import ModelSweep, model_sweep
from dakrun.bench.output import Record, head
from dakrun.bench.rows import Row, columns
from dakrun.bench.sweep import forecast
from dakrun.hardware import LOCAL, Card, HardwareProfile
from dakrun.launches import TierAccess

if TYPE_CHECKING:
    import torch

AnySweep = GemmSweep | AttentionSweep | ModelSweep

_SWEEPS: dict[str, Callable[..., AnySweep]] = {
    "gemm": gemm_sweep,
    "attention": attention_sweep,
    "model": model_sweep,
}


def parse_sweep(subject: str, options: dict[str, Any]) -> AnySweep:
    """The sweep of "gemm", "attention" or "model" that the command line's options describe.

    Raises UsageError if one is malformed.
    """
    return _SWEEPS[subject](**options)


def check_device(sweep: AnySweep) -> None:
    """Raise CannotRun if the sweep needs a GPU and there is none."""
    if isinstance(sweep, ModelSweep) and sweep.rival is None:
        return
    from dakrun.bench.tiers import check_gpu

    check_gpu()


def measure(
    sweep: AnySweep, profile: HardwareProfile, *, command: str, progress: Callable[[str], None]
) -> Iterator[Record]:
    """A record of all rows so far: once for a kernel, after each point of a model."""
    if isinstance(sweep, ModelSweep):
        from dakrun.bench.model import measure_model

        yield from measure_model(sweep, profile, command=command, progress=progress)
    elif isinstance(sweep, GemmSweep):
        from dakrun.bench.gemm import measure_gemm

        yield measure_gemm(sweep, profile, command=command, progress=progress)
    else:
        from dakrun.bench.attention import measure_attention

        yield measure_attention(sweep, profile, command=command, progress=progress)


class Chains(ABC):
    """Chains of launches of one kernel over operands in `buffers`, and of its baseline.

    `buffers` are uint8 [bytes] by tier, HBM first, and hold operands of `dtype`. Times are seconds
    of one launch, one for each of `replays` replays.
    """

    def __init__(
        self, buffers: "dict[str, torch.Tensor]", dtype: "torch.dtype", card: Card, replays: int
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
    new_chains: "Callable[[dict[str, torch.Tensor], torch.dtype, Card, int], Chains]",
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
    import torch

    from dakrun.bench.tiers import measure_ceilings, operands
    from dakrun.engine import direct_accesses
    from dakrun.kernels.runtime import card_of

    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
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
