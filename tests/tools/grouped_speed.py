"""Times the products with experts of Qwen3-30B-A3B beside torch._grouped_mm, and checks values.

    python tests/tools/grouped_speed.py --rows 8 --rows 512

A step of N rows multiplies each row by 8 of 128 experts, first by gate and up, then by down, all in
HBM. "dakrun" is the time of two launches. For few rows both are the grouped SplitK_GEMM, which also
gathers rows, gates them and combines each row's experts. For many rows both are the grouped tiled
GEMM, which gates; its rows are permuted beforehand. "whole" includes the launches that permute and
combine. torch's rows are always permuted beforehand; it neither gates nor combines.

Times are medians of CUDA graphs, replayed in turns. Each launch of a graph has other experts and
weights, together far more than L2 holds. The limit is the larger of two times: to read the chosen
experts' weights at the HBM rate measured here, and to multiply at --tflops. Exit status 1: a row of
a product is wrong.
"""

import argparse
import statistics
import sys
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch
from torch.nn import functional as F

from dakrun.config import Routing
from dakrun.formats import PACKED16
from dakrun.geometry import ROWS_PER_BLOCK, TILED_MAX_ROWS
from dakrun.hardware import LOCAL, Card
from dakrun.kernels.experts.dispatch import ExpertProducts
from dakrun.kernels.experts.grouped_tiled import grouped_tiled_gemm, tile_counters
from dakrun.kernels.experts.route import Routed, route
from dakrun.kernels.runtime import architecture, card_of, compile_ahead
from dakrun.kernels.variants import variants
from dakrun.lab.ceilings import FULL
from dakrun.lab.chain import seconds_round_robin
from dakrun.lab.memory import measure_ceilings
from dakrun.lab.samples import spread
from dakrun.launches import TierAccess, expert_splits, few_expert_rows, grouped_launch
from dakrun.memory.matrix import MatrixPart, TieredMatrix

DTYPE = torch.bfloat16
ROWS = 1, 8, 64, 512, 4096
LAYERS, INPUTS = 4, 16  # of a graph: 4.5 GiB of weights; each input of few rows has other experts
MOST_ERROR = 8e-3  # of a row, over its norm: products are rounded to bfloat16 once
REPLAYS, ACCESS = 9, (TierAccess(),)
BARS = {512: 0.80, 4096: 0.65}  # share of the limit
Layer = namedtuple("Layer", "up down ups downs")  # packed, and dense [E, M, K]
SOURCES = "grouped_splitk.cu", "grouped_tiled.cu", "permute.cu", "route.cu"


@dataclass(frozen=True)
class Mixture:
    """Experts of ffn size I behind rows [H]."""

    routing: Routing
    hidden: int
    ffn: int

    def layer(self, card: Card, device: torch.device) -> Layer:
        """Random matrices of all experts."""
        up = self._stacked(2 * self.ffn, self.hidden, card, device)
        down = self._stacked(self.hidden, self.ffn, card, device)
        dense = (of.dense(device).unflatten(0, (self.routing.experts, -1)) for of in (up, down))
        return Layer(up, down, *dense)

    def _stacked(self, rows: int, cols: int, card: Card, device: torch.device) -> TieredMatrix:
        experts, height = self.routing.experts, rows // ROWS_PER_BLOCK
        (split,) = expert_splits(
            (experts * height,), expert_row_blocks=height, top_k=self.routing.top_k, card=card
        )
        values = torch.randn(experts * rows * cols, dtype=DTYPE, device=device).mul_(cols**-0.5)
        part = MatrixPart(LOCAL, split, PACKED16, (values.view(torch.uint8),))
        return TieredMatrix((experts * rows, cols), DTYPE, (part,))


QWEN = Mixture(Routing(experts=128, top_k=8), hidden=2048, ffn=768)


class Step:
    """Both products of `n` rows through `layers`: launches are numbered, of `operands` in all."""

    def __init__(self, layers: Sequence[Layer], n: int, mixture: Mixture, card: Card) -> None:
        self.layers, self.n, self.mixture = layers, n, mixture
        like, rule, hidden = layers[0].ups.new_empty(0), mixture.routing, mixture.hidden
        self.many = n > few_expert_rows(experts=rule.experts, top_k=rule.top_k, card=card)
        router = torch.randn(rule.experts, hidden, device=like.device)
        inputs = range(1 if self.many else INPUTS)
        self.operands = len(layers) * len(inputs)
        self.xs = [like.new_empty(n, hidden).normal_() for _ in inputs]
        empty = [Routed.allocate(n, rule, hidden, like.device) for _ in inputs]
        self.routed = [route(x, router, rule, of) for x, of in zip(self.xs, empty, strict=True)]
        self.sorted = [x[of.tokens.long()] for x, of in zip(self.xs, self.routed, strict=True)]
        self.inner = like.new_empty(n * rule.top_k, mixture.ffn).normal_()
        self.products = like.new_empty(n * rule.top_k, hidden)
        self.out = like.new_zeros(n, hidden)
        self._whole = ExpertProducts(n, rule, hidden, mixture.ffn, like, card)
        self._counters, self._card = tile_counters(like.device), card

    def of(self, number: int) -> tuple[Layer, int]:
        """The layer and the input of a launch."""
        return self.layers[number % len(self.layers)], number // len(self.layers)

    def whole(self, number: int) -> None:
        """All launches between the router and the next norm; adds to `out`."""
        layer, turn = self.of(number)
        choices = [(slice(0, self.n), self.routed[turn])]
        inner = self._whole.gate_up(self.xs[turn], choices, layer.up, ACCESS)
        self._whole.down(inner, choices, layer.down, ACCESS, self.out)

    def tiled(self, number: int) -> None:
        """The two products of many rows, to `inner` and `products`."""
        layer, turn = self.of(number)
        ends = self.routed[turn].ends
        for x, weight, out, activation in (
            (self.sorted[turn], layer.up, self.inner, "silu_mul"),
            (self.inner, layer.down, self.products, "none"),
        ):
            row_blocks = (weight.shape[0] // ROWS_PER_BLOCK,)
            launch = grouped_launch(len(x), len(ends), row_blocks, ACCESS, card=self._card)
            grouped_tiled_gemm(
                x, ends, weight, launch, out, counters=self._counters, activation=activation,
                listed=True, pdl=True,
            )  # fmt: skip

    def torchs(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two products by torch, the second of what `inner` holds."""
        layer, turn = self.of(number)
        ends = self.routed[turn].ends
        up = torch._grouped_mm(self.sorted[turn], layer.ups.mT, offs=ends)
        return up, torch._grouped_mm(self.inner, layer.downs.mT, offs=ends)

    def check(self, number: int) -> None:
        """Raise ValueError if a row of a product differs too much from that in float64."""
        layer, turn = self.of(number)
        of, found = self.routed[turn], {}
        assert int(of.ends[-1]) == self.n * self.mixture.routing.top_k
        raw = multiplied(self.sorted[turn], of.ends, layer.ups)
        gated = F.silu(raw[:, ::2]) * raw[:, 1::2]
        down = multiplied(gated, of.ends, layer.downs)
        weighted = down * of.weights.double()[:, None]
        total = torch.zeros_like(self.out, dtype=torch.float64)
        self.out.zero_()
        self.whole(number)
        found["sum of experts"] = error(self.out, total.index_add_(0, of.tokens.long(), weighted))
        if self.many:
            self.inner.fill_(torch.nan)
            self.products.fill_(torch.nan)
            self.tiled(number)
            found["gated"], found["down"] = error(self.inner, gated), error(self.products, down)
        up, inner_down = self.torchs(number)
        down = multiplied(self.inner, of.ends, layer.downs)
        found["torch up"], found["torch down"] = error(up, raw), error(inner_down, down)
        if wrong := {name: value for name, value in found.items() if not value < MOST_ERROR}:
            raise ValueError(f"{self.n} rows: errors of {wrong}, at most {MOST_ERROR} are expected")


def counts(ends: torch.Tensor) -> list[int]:
    """Rows of each expert."""
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def multiplied(x: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows of x in the order of experts times their weights [E, M, K] in float64."""
    pieces = zip(x.split(counts(ends)), weights, strict=True)
    return torch.cat([rows.double() @ weight.double().T for rows, weight in pieces if len(rows)])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error of a row over the row's norm; NaN if any is."""
    return ((found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()


def measure(step: Step, hbm: float, flops_per_s: float) -> str:
    """A line of the table; values of the first and the last launch are checked before."""
    step.check(0)
    step.check(step.operands - 1)
    ours = step.tiled if step.many else step.whole
    chains = [(launch, step.operands) for launch in (ours, step.whole, step.torchs)]
    found = seconds_round_robin(chains, replays=REPLAYS, load=step.many)
    own, whole, torchs = map(statistics.median, found)
    n, mixture = step.n, step.mixture
    experts = statistics.fmean(sum(map(bool, counts(of.ends))) for of in step.routed)
    elements = 3 * mixture.hidden * mixture.ffn  # of an expert
    products = 2.0 * n * mixture.routing.top_k * elements
    limit = max(experts * elements * DTYPE.itemsize / hbm, products / flops_per_s)
    bars = (limit / own, BARS.get(n, 0.0)), (torchs / own, 1.0 if n > 1 else 0.0)
    under = [f"under {bar:.2f}" for value, bar in bars if value < bar]
    times = " ".join(f"{1e6 * seconds:9.1f}" for seconds in (limit, own, whole, torchs))
    shares = f"{limit / own:6.3f} {torchs / own:6.3f} {spread(found[0]):6.1%}"
    return f"{n:5d} {experts:7.1f} {times} {shares}  {', '.join(under) or 'ok'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products with experts beside torch's.")
    parser.add_argument("--rows", type=int, action="append", metavar="N", help=f"default: {ROWS}")
    parser.add_argument("--tflops", type=float, default=700.0, help="of the limit; default: 700")
    options = parser.parse_args()
    counted = options.rows or ROWS
    if not torch.cuda.is_available() or not all(1 <= n <= TILED_MAX_ROWS for n in counted):
        parser.error(f"needs a CUDA GPU, and --rows from 1 to {TILED_MAX_ROWS}")
    device = torch.device("cuda", torch.cuda.current_device())
    card, rate = card_of(device), 1e12 * options.tflops
    needed = variants(DTYPE, (8,), card, head_dim=128, routing=QWEN.routing)
    compile_ahead([of for of in needed if of[0] in SOURCES], architecture(device.index))
    hbm = measure_ceilings([], FULL, device).rates[LOCAL]
    click.echo(f"{torch.cuda.get_device_name()}: HBM {hbm / 1e9:,.0f} GB/s, {rate:.3g} FLOP/s")
    click.echo(" rows experts  limit us    dakrun     whole     torch  share torch/ spread")
    layers = [QWEN.layer(card, device) for _ in range(LAYERS)]
    for n in counted:
        try:
            click.echo(measure(Step(layers, n, QWEN, card), hbm, rate))
        except ValueError as problem:
            sys.exit(f"WRONG VALUES: {problem}")


if __name__ == "__main__":
    main()
