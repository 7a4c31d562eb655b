"""Products X W^T beside their ceilings and cuBLAS: `dakrun bench --kernel gemm`.

The ceilings come first, in the same process: bulk copies of random bytes into shared memory, from
HBM by all SMs and from the remote tier by the profile's SMs within its window, medians of five.
Then a CUDA graph is made for every case: a chain of launches of one shape with programmatic
dependent launch, each of which reads what the one before wrote (two buffers in turn) and a weight
of its own, and may have L2 look ahead at the next one's, as decode steps do. The kernel is the one
that computes so many rows of X everywhere else, too. There are eight weights at least, of more than
2 GiB in all, so L2 does not help otherwise; the chain goes through them as often as takes 4 ms. A
time is the graph's over its launches: the median of seven replays, after as many to warm up.
Weights are random: packing is a permutation, so random values are packed ones, too. Remote parts
lie in page-locked host memory or in a peer GPU's.

cuBLAS does the same with torch.mm and dense weights, all of them in HBM whatever the ratio. The
ablations take the window off (stages as deep as shared memory allows) and the alignment (groups of
row blocks as large as can be, though waves are then uneven).
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dakrun.bench.cases import forecast, units_by_tier
from dakrun.bench.ceilings import Ceilings
from dakrun.bench.effort import FULL, Effort
from dakrun.bench.gemm_cases import GemmCase
from dakrun.bench.gemm_rows import GemmRow, gemm_columns
from dakrun.bench.gemm_sweep import GemmSweep
from dakrun.bench.header import head
from dakrun.bench.output import Record
from dakrun.bench.tiers import fill_random, measure_ceilings, operands
from dakrun.engine.accesses import direct_accesses
from dakrun.geometry import row_block_count
from dakrun.hardware.profile import LOCAL, HardwareProfile
from dakrun.kernels.gemm.dispatch import By, Products
from dakrun.kernels.gemm.packing import PackedPart, PackedTensor, row_block_bytes
from dakrun.kernels.gemm.splitk_config import TierAccess, split_row_blocks
from dakrun.kernels.runtime.jit import architecture, compile_ahead
from dakrun.memory.tiers import aligned
from dakrun.plan.in_flight import is_windowed
from dakrun.probe.chain import launch_seconds

# Puts a launch with one of the weights, from x [N, K] to out [N, M], on the current stream.
Launch = Callable[[int, torch.Tensor, torch.Tensor], object]


def measure_gemm(
    sweep: GemmSweep,
    profile: HardwareProfile,
    *,
    effort: Effort = FULL,
    command: str,
    note: Callable[[str], None],
) -> Record:
    """Measure all cases of `sweep` on torch's current GPU; `note` is told of each.

    `profile` predicts, and says how the remote tier is read; `command` is kept in the record.
    Raises CannotRun where there is no memory for it, or no kernel for the GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = getattr(torch, sweep.dtype)
    products = Products(device)
    remote = sweep.remote_tiers(profile)
    mixes = not all(map(is_windowed, remote))  # what needs no window may be
    compile_ahead(products.variants(sweep.rows, dtype, mixes=mixes), architecture(device.index))
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    ceilings = measure_ceilings(remote, effort, device)
    tiers = len(ceilings.rates)
    cases = list(gemm_cases(sweep, ceilings.turning_point, effort, tiers=tiers))
    with operands(cases, "weights", ceilings.rates, device, note) as buffers:
        chains = Chains(buffers, dtype, sms, effort.replays, products)
        rows = _Bench(sweep, profile, ceilings, chains, note).rows(cases)
    return Record(
        head=head({"kernel": "gemm"}, sweep.dtype, ceilings, profile, command),
        columns=gemm_columns(sweep),
        rows=tuple(row.figures(ablations=sweep.ablations) for row in rows),
    )


def gemm_cases(
    sweep: GemmSweep, turning_point: float, effort: Effort, *, tiers: int
) -> Iterator[GemmCase]:
    """The cases by shape, rows of X and ratio, with row blocks in each of one or two `tiers`."""
    for shape, n, asked in itertools.product(sweep.shapes, sweep.rows, sweep.ratios):
        row_blocks, size = row_block_count(shape.rows), row_block_bytes(shape.cols)
        yield GemmCase(
            shape=shape,
            n=n,
            asked=asked,
            units=units_by_tier(row_blocks, asked, turning_point, tiers=tiers),
            unit_bytes=size,
            launches=effort.launches(row_blocks * size),
        )


@dataclass(frozen=True)
class _Bench:
    """The measuring of a sweep's cases, of which `note` is told."""

    sweep: GemmSweep
    profile: HardwareProfile
    ceilings: Ceilings
    chains: "Chains"
    note: Callable[[str], None]

    def rows(self, cases: Sequence[GemmCase]) -> list[GemmRow]:
        """All cases; cuBLAS is measured once for those that differ in their ratio alone."""
        rows: list[GemmRow] = []
        for (shape, n), group in itertools.groupby(cases, key=lambda case: (case.shape, case.n)):
            alike = list(group)
            if not rows or rows[-1].case.shape != shape:
                self.chains.fill(shape.cols)
            cublas_s = statistics.median(self.chains.cublas(alike[0]))
            for case in alike:
                row = self._row(case, cublas_s)
                self.note(f"{shape} N={n} {row.summary}")
                rows.append(row)
        return rows

    def _row(self, case: GemmCase, cublas_s: float) -> GemmRow:
        remote = tuple(self.chains.buffers)[1:]
        dtype = self.sweep.dtype
        expected = forecast(case, case.op(dtype), dtype, self.profile, remote)
        access = [TierAccess(), *direct_accesses(self.profile, remote, expected.sms[1:])]
        samples_s, by = self.chains.product(case, access)
        row = GemmRow(
            case=case,
            by=by,
            samples_s=samples_s,
            bound_s=self.ceilings.seconds(case.tier_bytes),
            predicted_s=expected.seconds,
            rival_s=cublas_s,
        )
        return self._ablated(row, access) if self.sweep.ablations else row

    def _ablated(self, row: GemmRow, access: Sequence[TierAccess]) -> GemmRow:
        """The row with its case measured without windows, where it has any, and alignment."""
        window_off_s = None
        if row.case.ratio:
            deep = [replace(tier, window_bytes=None) for tier in access]
            window_off_s = statistics.median(self.chains.product(row.case, deep)[0])
        uneven, _ = self.chains.product(row.case, access, aligned=False)
        alignment_off_s = statistics.median(uneven)
        return replace(row, window_off_s=window_off_s, alignment_off_s=alignment_off_s)


class Chains:
    """Chains of launches over the weights in `buffers`: uint8, 1-D, by tier, HBM first.

    Times are seconds of one launch, replay by replay.
    """

    def __init__(
        self,
        buffers: dict[str, torch.Tensor],
        dtype: torch.dtype,
        sms: int,
        replays: int,
        products: Products,
    ) -> None:
        self.buffers = buffers
        self._dtype, self._sms, self._replays, self._products = dtype, sms, replays, products

    def fill(self, cols: int) -> None:
        """Put random weights of `cols` columns into all buffers."""
        # So scaled, products of products neither vanish nor overflow.
        fill_random(self.buffers, self._dtype, scale=cols**-0.5)

    def product(
        self, case: GemmCase, access: Sequence[TierAccess], *, aligned: bool = True
    ) -> tuple[list[float], By]:
        """With the case's row blocks in each tier, read as `access` says; and what computes it."""
        shape = (case.shape.rows, case.shape.cols)
        splits = split_row_blocks(case.units, access, sms=self._sms, aligned=aligned)
        weights = [
            PackedTensor(
                shape,
                self._dtype,
                tuple(
                    PackedPart(tier, split, buffer[number * size : (number + 1) * size])
                    for (tier, buffer), split, size in zip(
                        self.buffers.items(), splits, case.tier_bytes, strict=True
                    )
                ),
            )
            for number in range(case.launches)
        ]

        def launch(operand: int, x: torch.Tensor, out: torch.Tensor) -> None:
            following = weights[(operand + 1) % case.launches]
            ahead = self._products.ahead(case.n, following, access)
            self._products(x, weights[operand], access, out, pdl=True, ahead=ahead)

        return self._seconds(case, launch), self._products.by(case.n, weights[0])

    def cublas(self, case: GemmCase) -> list[float]:
        """cuBLAS with the case's weight dense and all in HBM."""
        rows, cols = case.shape.rows, case.shape.cols
        size = rows * cols * self._dtype.itemsize
        starts = range(0, case.launches * aligned(size), aligned(size))
        local = self.buffers[LOCAL]
        weights = [local[at : at + size].view(self._dtype).view(rows, cols).t() for at in starts]

        def launch(operand: int, x: torch.Tensor, out: torch.Tensor) -> None:
            torch.mm(x, weights[operand], out=out)

        return self._seconds(case, launch)

    def _seconds(self, case: GemmCase, launch: Launch) -> list[float]:
        """Seconds of a launch in each replay of the chain, each reading what the last one wrote.

        Only the first weight's launch reads random numbers: else products of so many would vanish
        or overflow. Where the output is the smaller, the rest of the next input stays as it was.
        """
        n, rows, cols = case.n, case.shape.rows, case.shape.cols
        device = self.buffers[LOCAL].device
        start, *ends = (
            torch.randn(n * max(rows, cols), dtype=self._dtype, device=device) for _ in range(3)
        )
        xs = [end[: n * cols].view(n, cols) for end in (start, *ends)]
        outs = [end[: n * rows].view(n, rows) for end in ends]

        def step(operand: int) -> None:
            x = xs[operand % 2 + 1] if operand else xs[0]
            launch(operand, x, outs[(operand + 1) % 2])

        return launch_seconds(step, case.launches, replays=self._replays)
