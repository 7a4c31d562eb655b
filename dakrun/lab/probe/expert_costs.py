"""Costs of experts and of their routers: layers of mixtures, in chains in CUDA graphs.

Weights are random values in the HBM buffer. Knows no profiles.
"""

import itertools
from dataclasses import dataclass

import torch

from dakrun.config import Routing
from dakrun.formats import PACKED16
from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.hardware import LOCAL, Card, Sweep
from dakrun.kernels import normalize
from dakrun.kernels.experts.dispatch import Choices, ExpertProducts
from dakrun.lab.chain import launch_seconds, seconds_round_robin
from dakrun.lab.probe import gemm_costs as costs
from dakrun.lab.probe.sweeps import Bench, rounded
from dakrun.launches import EXPERT_CHUNK_ROWS, expert_splits
from dakrun.memory.matrix import MatrixPart, TieredMatrix

HIDDEN, FFN = 2048, 768  # Qwen3-30B-A3B
FFN_STEP = 128  # an FFN that fits a smaller buffer is a multiple of this
ROUTED_COLS = 2048, 4096  # columns of rows that are normalized and routed
ROUTERS = 64  # of a chain
INPUTS = 16  # matrices X of a chain: a layer's launch chooses other experts than its last one


@dataclass(frozen=True)
class Mixtures:
    """Two mixtures; a step of `rows` rows gives each expert of both as many of them."""

    rows: int
    larger: Routing
    smaller: Routing

    @property
    def expert_rows(self) -> int:
        """Mean rows of an expert that has any, rounded: what costs go by."""
        of = self.larger
        chosen = 1 - (1 - of.top_k / of.experts) ** self.rows
        return round(self.rows * of.top_k / (of.experts * chosen))


SPARSE = Routing(experts=128, top_k=8), Routing(experts=32, top_k=2)
DENSE = Routing(experts=32, top_k=8), Routing(experts=8, top_k=2)
# Up to 4 rows of an expert in the mean are SplitK_GEMM's, more are the grouped tiled GEMM's, whose
# stages have room for more and more of them.
MIXTURES = (
    Mixtures(8, *SPARSE), Mixtures(64, *SPARSE), Mixtures(64, *DENSE),
    *(Mixtures(rows, *SPARSE) for rows in (512, 1024, 2048, 4096)),
)  # fmt: skip
ROUTINGS = SPARSE[0], DENSE[0]  # whose kernels are all that is launched


def router_sweep(bench: Bench) -> Sweep:
    """A norm and the router behind it, by rows and bytes of X, which are read and written."""
    rows = []
    numbers = sorted({mixtures.rows for mixtures in MIXTURES})
    for n, cols in itertools.product(numbers, ROUTED_COLS):
        layers = Layers(bench, bench.hbm, n, SPARSE[0], cols)
        seconds = launch_seconds(layers.route, ROUTERS, replays=bench.effort.runs)
        rows.append(costs.row(n, 2 * layers.inputs[0].nbytes, seconds))
    return rounded(costs.COLUMNS, rows)


def experts_sweep(bench: Bench) -> Sweep:
    """A product with experts, by the rows that an expert has and the bytes of those chosen.

    It is the mean of gate-up and down: half of what both add to a layer's norm and router.
    """
    memory, rows = costs.random_memory(bench), []
    memory.view(costs.DTYPE).mul_(HIDDEN**-0.5)
    for mixtures in MIXTURES:
        fitting = memory.numel() // (6 * HIDDEN * mixtures.larger.experts)  # one layer of these
        ffn = min(FFN, fitting // FFN_STEP * FFN_STEP)
        for routing in (mixtures.larger, mixtures.smaller):
            layers = Layers(bench, memory, mixtures.rows, routing, HIDDEN, ffn)
            chains = [(launch, layers.operands) for launch in (layers.whole, layers.route)]
            load = mixtures.rows > EXPERT_CHUNK_ROWS
            more, less = seconds_round_robin(chains, replays=bench.effort.runs, load=load)
            added = [(a - b) / 2 for a, b in zip(more, less, strict=True)]
            read = round(layers.bytes_read() / 2)
            rows.append(costs.row(mixtures.expert_rows, read, added, of=more))
    return rounded(costs.COLUMNS, rows)


class Layers:
    """Layers of a mixture in `memory`, as many as fit, and matrices X [n, hidden] for them.

    Without `ffn` there are ROUTERS routers alone. Launches of a chain are numbered: `operands` of
    them take each layer with each X.
    """

    def __init__(
        self, bench: Bench, memory: torch.Tensor, n: int, routing: Routing, hidden: int,
        ffn: int = 0,
    ) -> None:  # fmt: skip
        self._experts = routing.experts
        inputs = INPUTS if n <= EXPERT_CHUNK_ROWS else 1  # more rows choose all experts anyway
        self.inputs = [costs.random(memory, n, hidden) for _ in range(inputs)]
        self._normed, self._out = torch.empty_like(self.inputs[0]), torch.zeros_like(self.inputs[0])
        self._lengths = torch.zeros(n, dtype=torch.int32, device=memory.device)
        self._routers = torch.randn(ROUTERS, routing.experts, hidden, device=memory.device)
        self._products = ExpertProducts(n, routing, hidden, ffn or FFN, self._normed, bench.card)
        up, down = (2 * ffn, hidden), (hidden, ffn)
        sizes = [routing.experts * rows * cols * costs.DTYPE.itemsize for rows, cols in (up, down)]
        self._layers = [
            (_stack(ups, up, routing, bench.card), _stack(downs, down, routing, bench.card))
            for piece in (costs.pieces(memory, sum(sizes))[:ROUTERS] if ffn else ())
            for ups, downs in [piece.split(sizes)]
        ]
        self._count = len(self._layers) or ROUTERS
        self.operands = self._count * inputs

    def route(self, number: int) -> Choices:
        """Launch a norm and a router: the experts chosen for the rows, until the next launch."""
        turn, layer = divmod(number, self._count)
        normalize(self.inputs[turn], self._normed, "rms", eps=costs.EPS, pdl=True, pad_grid=True)
        return self._products.route(self._normed, self._routers[layer], None, self._lengths)

    def whole(self, number: int) -> None:
        """Launch a layer: norm, router, gate-up and down."""
        up, down = self._layers[number % self._count]
        choices = self.route(number)
        inner = self._products.gate_up(self._normed, choices, up, costs.ACCESS)
        self._products.down(inner, choices, down, costs.ACCESS, self._out)

    def bytes_read(self) -> float:
        """Mean bytes of the experts that a launch of a layer reads."""
        chosen = torch.zeros((), dtype=torch.int64, device=self._normed.device)
        for number in range(self.operands):
            for _, routed in self.route(number):
                chosen += routed.ends.diff(prepend=routed.ends.new_zeros(1)).count_nonzero()
        expert = sum(weight.parts[0].nbytes for weight in self._layers[0]) / self._experts
        return int(chosen) / self.operands * expert


def _stack(
    data: torch.Tensor, shape: tuple[int, int], routing: Routing, card: Card
) -> TieredMatrix:
    """The matrices of a layer's experts in `data`, each of `shape`."""
    rows, cols = shape
    (split,) = expert_splits(
        (routing.experts * rows // ROWS_PER_BLOCK,), expert_row_blocks=rows // ROWS_PER_BLOCK,
        top_k=routing.top_k, card=card,
    )  # fmt: skip
    part = MatrixPart(LOCAL, split, PACKED16, (data,))
    return TieredMatrix((routing.experts * rows, cols), costs.DTYPE, (part,))
