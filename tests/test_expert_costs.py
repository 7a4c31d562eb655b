"""What `dakrun profile` launches to measure routers and experts, with stand-ins for kernels."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cards import H200

from dakrun.config import Routing
from dakrun.hardware import Card
from dakrun.kernels.runtime import card_of
from dakrun.lab.ceilings import MIB
from dakrun.lab.probe import expert_costs
from dakrun.lab.probe.congestion import op_costs
from dakrun.lab.probe.effort import QUICK
from dakrun.lab.probe.sweeps import Bench
from dakrun.memory.matrix import TieredMatrix

ROUTER_S, PRODUCT_S, RATE = 8e-6, 5e-6, 4e12


class Kernels:
    """Stands in for ExpertProducts: each router gives each X random experts; launches take time."""

    seconds = 0.0
    normalized = 0.0  # an element of X

    def __init__(
        self, rows: int, routing: Routing, hidden: int, ffn: int, like: torch.Tensor, card: Card
    ) -> None:
        self.rows, self.routing, self.hidden = rows, routing, hidden
        assert card == H200 and like.shape == (rows, hidden)

    def route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: None, lengths: torch.Tensor
    ) -> Any:
        of = self.routing
        assert weight.shape == (of.experts, self.hidden) and weight.dtype == torch.float32
        assert x.shape == (self.rows, self.hidden) and len(lengths) == self.rows
        seed = hash((float(weight[0, 0]), Kernels.normalized)) % 2**31
        scores = torch.rand(self.rows, of.experts, generator=torch.Generator().manual_seed(seed))
        self.chosen = scores.topk(of.top_k).indices.flatten().unique()
        counts = torch.zeros(of.experts, dtype=torch.int64).index_fill(0, self.chosen, 1)
        Kernels.seconds += ROUTER_S
        return [(slice(0, self.rows), SimpleNamespace(ends=counts.cumsum(0)))]

    def gate_up(self, x: torch.Tensor, choices: Any, weight: TieredMatrix, access: Any) -> str:
        self.multiply(weight, self.hidden)
        return "inner"

    def down(
        self, inner: str, choices: Any, weight: TieredMatrix, access: Any, out: torch.Tensor
    ) -> None:
        assert inner == "inner" and out.shape == (self.rows, self.hidden)
        assert weight.shape[0] == self.routing.experts * self.hidden
        self.multiply(weight, weight.shape[1])

    def multiply(self, weight: TieredMatrix, cols: int) -> None:
        assert weight.shape[1] == cols
        nbytes = 2 * weight.shape[0] * cols
        assert [part.nbytes for part in weight.parts] == [nbytes]
        assert weight.parts[0].split.height == weight.shape[0] // self.routing.experts // 8
        Kernels.seconds += PRODUCT_S + nbytes * len(self.chosen) / self.routing.experts / RATE


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    def normalize(x: torch.Tensor, out: torch.Tensor, norm: str, **how: Any) -> None:
        assert norm == "rms" and how == {"eps": 1e-5, "pdl": True, "pad_grid": True}
        assert x.shape == out.shape
        Kernels.normalized = float(x[0, 0])

    def launched(launch: Callable[[], None]) -> float:
        Kernels.seconds = 0.0
        launch()
        return Kernels.seconds

    monkeypatch.setattr(expert_costs, "normalize", normalize)
    monkeypatch.setattr(expert_costs, "ExpertProducts", Kernels)
    monkeypatch.setattr(expert_costs, "INPUTS", 2)
    monkeypatch.setattr(expert_costs, "ROUTERS", 24)
    monkeypatch.setattr("dakrun.lab.chain.graph_seconds", lambda f, runs, **_: [launched(f)] * runs)
    monkeypatch.setattr("dakrun.lab.chain.recorded", lambda launch: SimpleNamespace(replay=launch))
    monkeypatch.setattr("dakrun.lab.chain.event_seconds", launched)
    monkeypatch.setattr("dakrun.lab.chain.MIN_SECONDS", 1e-5)
    monkeypatch.setattr("dakrun.lab.chain.LOAD_SECONDS", 0.0)
    few = tuple(m for m in expert_costs.MIXTURES if m.rows <= 512)
    monkeypatch.setattr(expert_costs, "MIXTURES", few)
    torch.manual_seed(0)
    memory = torch.zeros(256 * MIB, dtype=torch.uint8)
    return Bench(H200, memory, replace(QUICK, runs=2))


def test_costs_go_by_the_rows_of_an_expert() -> None:
    """The kernels' tiles of X have 8, 16 and 64 rows; more are the grouped tiled GEMM's."""
    assert [of.expert_rows for of in expert_costs.MIXTURES] == [1, 4, 16, 32, 64, 128, 256]
    for of in expert_costs.MIXTURES:
        assert of.larger.experts == 4 * of.smaller.experts
        assert of.larger.top_k == 4 * of.smaller.top_k, "as many rows an expert"


def test_experts_are_what_they_add_to_a_router(bench: Bench) -> None:
    """In a small buffer experts are small; bytes are those of the experts that are chosen."""
    sweep = expert_costs.experts_sweep(bench)
    expert = 3 * 2048 * 128 * 2  # bytes
    smallest, largest = sweep.column("op_bytes")[1], sweep.column("op_bytes")[2]
    assert smallest == pytest.approx(12.9 * expert / 2, rel=0.15), "of 32, 8 rows choose 2 each"
    assert largest == pytest.approx(125.9 * expert / 2, rel=0.05), "of 128, 64 rows choose 8 each"
    costs = op_costs(sweep, lambda n: RATE / 0.8)
    assert costs.rows == (1, 4, 16, 32)
    assert costs.seconds == pytest.approx((PRODUCT_S,) * 4, rel=0.1)
    assert costs.efficiency == pytest.approx((0.8,) * 4, rel=0.05)


def test_routers_are_one_after_the_other(bench: Bench) -> None:
    sweep = expert_costs.router_sweep(bench)
    assert sweep.points("n", "op_bytes") == [
        (n, 4 * n * cols) for n in (8, 64, 512) for cols in (2048, 4096)
    ]
    assert set(sweep.column("op_s")) == {ROUTER_S}


def test_layers_that_kernels_run(kernel_device: str) -> None:
    """Each launch adds the experts of some rows; bytes are those of at most all experts."""
    routing, hidden, ffn, n = Routing(experts=4, top_k=2), 512, 64, 3
    device = torch.device(kernel_device)
    layer = 3 * routing.experts * hidden * ffn
    memory = (0.05 * torch.randn(2 * layer + 8, dtype=torch.float16)).to(device).view(torch.uint8)
    layers = expert_costs.Layers(
        Bench(card_of(device), memory, QUICK), memory, n, routing, hidden, ffn
    )
    assert layers.operands == 2 * expert_costs.INPUTS
    sums = []
    for number in (0, 1, 2):
        before = layers._out.clone()
        layers.whole(number)
        sums.append((layers._out - before).float())
        assert bool(sums[-1].isfinite().all()) and float(sums[-1].abs().max()) > 0.01
    assert not torch.equal(sums[0], sums[1]) and not torch.equal(sums[0], sums[2])
    layers.operands = 2
    assert layer <= layers.bytes_read() <= 2 * layer, "2 to 4 of 4 experts"
