"""Chains of products with packed weights in tiers, and of cuBLAS products."""

from collections.abc import Callable, Sequence

import torch

from dakrun.formats import PACKED16
from dakrun.hardware import Card
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import architecture, compile_ahead
from dakrun.lab.cases import Case, Weight
from dakrun.lab.chain import Launch, seconds_round_robin
from dakrun.lab.chains.base import Chains
from dakrun.launches import TierAccess, few_rows, split_row_blocks
from dakrun.memory.matrix import MatrixPart, TieredMatrix

# Multiply(i, x, out) multiplies x [N, K] by weight number i into out [N, M].
Multiply = Callable[[int, torch.Tensor, torch.Tensor], object]


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
        """Times of a chain of products: of many rows under load, as those of the profile."""
        step = self._step(case, multiply)
        if case.operand.n <= few_rows(self.card):  # type: ignore[union-attr]
            return self.seconds(case, step)
        chain = step, case.launches
        (times,) = seconds_round_robin([chain], replays=self.replays, load=True)
        return times

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
