"""Products X W^T compared with their ceilings and cuBLAS: `dakrun bench --kernel gemm`.

Each case is a CUDA graph of launches of one shape with programmatic dependent launch. A launch
reads its own weight and the output of the launch before it (two buffers alternate), and may
prefetch the next launch's weight into L2, as decode steps do. The kernel is the one that the
engine uses for that many rows of X. A chain has at least eight weights of more than 2 GiB in
total, so L2 holds none of them but the prefetched one, and repeats them until it takes 4 ms. A
time is the graph's time over its launches: the median of seven replays after seven to warm up.
Weights are random values in packed order; the remote parts lie in page-locked host memory or a
peer GPU's.

The baseline is cuBLAS: the same with torch.mm and dense weights in HBM, whatever the ratio. One
ablation reads without the congestion window (as many stages as shared memory holds), the other
without wave alignment (largest groups of row blocks, so that waves are uneven).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from dakrun.formats import PACKED16
from dakrun.hardware import LOCAL, Card, HardwareProfile
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import architecture, card_of, compile_ahead
from dakrun.lab.bench.ceilings import FULL, Effort
from dakrun.lab.bench.gemm_sweep import GemmCase, GemmSweep
from dakrun.lab.bench.kernel import Chains, measure_kernel
from dakrun.lab.bench.output import Record
from dakrun.lab.bench.rows import GemmRow
from dakrun.lab.bench.tiers import fill_random
from dakrun.lab.probe.chain import launch_seconds
from dakrun.launches import By, TierAccess, split_row_blocks
from dakrun.memory.matrix import MatrixPart, TieredMatrix
from dakrun.memory.tiers import aligned
from dakrun.plan import is_windowed

# Launch(i, x, out) multiplies x [N, K] by weight number i into out [N, M].
Launch = Callable[[int, torch.Tensor, torch.Tensor], object]


def measure_gemm(
    sweep: GemmSweep,
    profile: HardwareProfile,
    *,
    effort: Effort = FULL,
    command: str,
    progress: Callable[[str], None],
) -> Record:
    """Measure all cases of `sweep` on torch's current GPU; see measure_kernel.

    Raises CannotRun if memory is short or no kernel supports the GPU.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    products = Products(device, card)
    mixes = not all(is_windowed(tier, card) for tier in sweep.remote_tiers(profile))
    variants = products.variants(sweep.rows, getattr(torch, sweep.dtype), mixes=mixes)
    compile_ahead(variants, architecture(device.index))
    new_chains = partial(GemmChains, products=products, ablations=sweep.ablations)
    return measure_kernel(
        sweep, profile, new_chains, effort=effort, command=command, progress=progress
    )


class GemmChains(Chains):
    """Chains of products over the weights in `buffers`."""

    def __init__(
        self,
        buffers: dict[str, torch.Tensor],
        dtype: torch.dtype,
        card: Card,
        replays: int,
        *,
        products: Products,
        ablations: bool,
    ) -> None:
        super().__init__(buffers, dtype, card, replays)
        self._products, self._ablations = products, ablations
        self._cols = 0  # columns of the weights in the buffers

    def fill(self, case: GemmCase) -> None:
        """Write normal weights of variance 1 / K, so that outputs keep the scale of X."""
        if case.shape.cols != self._cols:
            self._cols = case.shape.cols
            fill_random(self.buffers, self._dtype, scale=self._cols**-0.5)

    def row(self, case: GemmCase, access: Sequence[TierAccess], **known: float) -> GemmRow:
        samples_s, by = self.products(case, access)
        row = GemmRow(case=case, by=by, samples_s=samples_s, **known)
        if not self._ablations:
            return row
        window_off_s = None
        if case.ratio:
            deep = [replace(tier, window_bytes=None) for tier in access]
            window_off_s = statistics.median(self.products(case, deep)[0])
        uneven, _ = self.products(case, access, replace(self._card, even_waves=False))
        return replace(row, window_off_s=window_off_s, alignment_off_s=statistics.median(uneven))

    def products(
        self, case: GemmCase, access: Sequence[TierAccess], layout: Card | None = None
    ) -> tuple[list[float], By]:
        """Times with the case's row blocks in each tier, and the kernel that was launched.

        Row blocks are laid out for the card `layout`, if given.
        """
        shape = (case.shape.rows, case.shape.cols)
        splits = split_row_blocks(case.units, access, card=layout or self._card)
        weights = [
            TieredMatrix(
                shape,
                self._dtype,
                tuple(
                    MatrixPart(
                        tier, split, PACKED16, (buffer[number * size : (number + 1) * size],)
                    )
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

        return self.seconds(case, launch), self._products.kernel_for(case.n, weights[0])

    def baseline(self, case: GemmCase) -> list[float]:
        rows, cols = case.shape.rows, case.shape.cols
        size = rows * cols * self._dtype.itemsize
        starts = range(0, case.launches * aligned(size), aligned(size))
        local = self.buffers[LOCAL]
        weights = [local[at : at + size].view(self._dtype).view(rows, cols).t() for at in starts]

        def launch(operand: int, x: torch.Tensor, out: torch.Tensor) -> None:
            torch.mm(x, weights[operand], out=out)

        return self.seconds(case, launch)

    def seconds(self, case: GemmCase, launch: Launch) -> list[float]:
        """Times of a chain in which each launch reads the output of the one before.

        The first weight's launch reads random numbers instead: over the whole chain, products of
        products would vanish or overflow. Where M < K, the rest of the next input
        keeps its first random numbers.
        """
        n, rows, cols = case.n, case.shape.rows, case.shape.cols
        start, *ends = (
            torch.randn(n * max(rows, cols), dtype=self._dtype, device=self.device)
            for _ in range(3)
        )
        xs = [end[: n * cols].view(n, cols) for end in (start, *ends)]
        outs = [end[: n * rows].view(n, rows) for end in ends]

        def step(operand: int) -> None:
            x = xs[operand % 2 + 1] if operand else xs[0]
            launch(operand, x, outs[(operand + 1) % 2])

        return launch_seconds(step, case.launches, replays=self._replays)
