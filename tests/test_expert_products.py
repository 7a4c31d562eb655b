"""Passes through layers of experts: choices of launches, and the memory that they keep."""

from itertools import pairwise

import pytest
import torch
from cards import SMALL, here, hopper
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import normal, packed

from dakrun.config import Routing
from dakrun.formats import Split
from dakrun.geometry import ATOM_BYTES, SPLITK_MAX_ROWS, TILED_MAX_ROWS
from dakrun.hardware import Card
from dakrun.kernels import normalize
from dakrun.kernels.experts import dispatch
from dakrun.kernels.experts import reference as plain
from dakrun.kernels.experts.dispatch import ExpertProducts
from dakrun.kernels.runtime import capture, card_of
from dakrun.launches import (
    ROUTER_MAX_ROWS,
    ROUTER_TILE_ROWS,
    TierAccess,
    expert_buffer_bytes,
    expert_chunks,
    expert_splits,
    few_expert_rows,
    grouped_config,
    grouped_shape,
    grouped_tiles,
    router_ctas,
    router_rows,
)
from dakrun.memory.matrix import TieredMatrix
from dakrun.models import known_model

ROUTING = Routing(experts=6, top_k=2)
HIDDEN, FFN = 64, 24


def products(rows: int, device: str = "cpu") -> ExpertProducts:
    like = torch.empty(0, dtype=torch.float16, device=device)
    card = hopper(3) if device == "cpu" else here(3)
    return ExpertProducts(rows, ROUTING, HIDDEN, FFN, like, card)


@pytest.mark.parametrize("rows", [1, 30, 300, 1000, 9000])
def test_their_bytes_are_those_of_the_plan(rows: int) -> None:
    kept = products(rows)
    tensors = [kept._inner, kept._sums.partials, kept._sums.arrivals, kept._sorted]
    for one in kept._routed:
        tensors += [one.tokens, one.weights, one.ends, one.pairs, *one.scratch.values()]
    planned = expert_buffer_bytes(rows, experts=6, top_k=2, hidden=HIDDEN, ffn=FFN)
    found = sum(tensor.nbytes for tensor in tensors)
    assert 0.95 * planned - 2048 <= found <= planned + 2048


@pytest.mark.parametrize("hidden", [512, 2048, 5120])
@pytest.mark.parametrize("rows", [1, 8, 64, 65, 4096])
def test_the_router_has_a_cta_on_each_sm_while_that_is_enough(rows: int, hidden: int) -> None:
    card = hopper(132)
    band = router_rows(rows, experts=128, hidden=hidden, card=card)
    ctas = router_ctas(128, hidden)

    def in_all(band: int) -> int:
        return -(-rows // band) * ctas

    assert band % ROUTER_TILE_ROWS == 0 and band <= ROUTER_MAX_ROWS
    assert in_all(band) <= card.sms or band == ROUTER_MAX_ROWS
    fewer = band - ROUTER_TILE_ROWS
    assert not fewer or in_all(fewer) > card.sms


def test_rows_in_chunks_are_as_rows_together(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as plain torch computes them; a row without a request keeps its hidden state.

    Chunks are of the card that has no room for the grouped tiled GEMM.
    """
    n, dtype = 13, torch.float16
    x = normal(n, HIDDEN, dtype=dtype, device=kernel_device)
    residual = 0.5 * x
    weight = normal(6, HIDDEN, dtype=torch.float32, device=kernel_device)
    lengths = torch.arange(n, dtype=torch.int32, device=kernel_device)
    lengths[4] = -1
    stacked = [
        packed(
            0.2 * normal(6 * m, k, dtype=dtype, device=kernel_device),
            expert_splits((6 * m // 8 - 5, 5), expert_row_blocks=m // 8, top_k=2, card=hopper(3)),
        )
        for m, k in ((2 * FFN, HIDDEN), (HIDDEN, FFN))
    ]
    accesses, found = (TierAccess(), TierAccess(sms=1)), []
    for step in (64, 5):
        for module in ("dakrun.launches.experts", "dakrun.kernels.experts.dispatch"):
            monkeypatch.setattr(f"{module}.few_expert_rows", lambda step=step, **_: step)
        run = products(n, kernel_device)
        choices = run.route(x, weight, None, lengths)
        assert len(choices) == -(-n // step)
        monkeypatch.setattr("dakrun.launches.experts.grouped_shape", lambda *_: None)
        inner = run.gate_up(x, choices, stacked[0], accesses)
        found.append(run.down(inner, choices, stacked[1], accesses, residual.clone()))
    assert (found[0] - found[1]).abs().max() < 2e-2  # tiles of X may differ
    assert torch.equal(found[0][4], residual[4])
    chosen = plain.route(x, weight, None, ROUTING)
    rows = stacked[0].dense().view(6, FFN, 2, HIDDEN).transpose(1, 2).reshape(-1, HIDDEN)
    whole = packed(rows.to(kernel_device), [Split(len(rows) // 8)])
    wanted = plain.down(
        plain.gate_up(x, chosen, whole, 2 * FFN), chosen,
        packed(stacked[1].dense().to(kernel_device), [Split(6 * HIDDEN // 8)]), residual,
    )  # fmt: skip
    others = [row for row in range(n) if row != 4]
    torch.testing.assert_close(found[0][others], wanted[others], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("rows", "small"), [(16, False), (17, False), (64, False), (64, True)])
def test_the_first_product_starts_early_where_each_sm_gets_one_of_its_ctas(
    rows: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind norm and router of few rows, or where an SM has room for one alone."""
    early = []
    monkeypatch.setattr(dispatch, "gate_up", lambda *_, pdl: early.append(pdl))
    monkeypatch.setattr(ExpertProducts, "_config", lambda *_: None)
    like = torch.empty(0, dtype=torch.float16)
    card = SMALL if small else hopper(132)
    run = ExpertProducts(rows, Routing(experts=128, top_k=8), HIDDEN, FFN, like, card)
    x, weight = torch.zeros(rows, HIDDEN), packed(torch.zeros(96, 64).half(), [Split(12)])
    for pdl in (True, False):
        run.gate_up(x, [(slice(0, rows), run._routed[0])], weight, (TierAccess(),), pdl=pdl)
    assert early == [small or rows <= 16, False]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 64])
def test_a_graph_replays_what_the_router_chooses_then(n: int) -> None:
    """Through several layers in two tiers, whose launches overlap."""
    layers, experts, hidden, ffn, device = 5, 32, 1024, 384, "cuda:0"
    rule, dtype = Routing(experts=experts, top_k=4), torch.bfloat16
    card = card_of(torch.device(device))
    generator = torch.Generator(device).manual_seed(n)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def matrix(m: int, k: int) -> TieredMatrix:
        count = experts * m // 8
        splits = expert_splits(
            (count - count // 3, count // 3), expert_row_blocks=m // 8, top_k=4, card=card
        )
        return packed((random(experts * m, k) * k**-0.5).to(dtype), splits)

    routers = [random(experts, hidden) for _ in range(layers)]
    ups = [matrix(2 * ffn, hidden) for _ in range(layers)]
    downs = [matrix(hidden, ffn) for _ in range(layers)]
    run = ExpertProducts(n, rule, hidden, ffn, torch.empty(0, dtype=dtype, device=device), card)
    lengths = torch.zeros(n, dtype=torch.int32, device=device)
    accesses = (TierAccess(), TierAccess(sms=8, window_bytes=256 * 1024))
    x = random(n, hidden).to(dtype)

    def forward() -> None:
        for router, up, down in zip(routers, ups, downs, strict=True):
            normed = normalize(x, torch.empty_like(x), "rms", eps=1e-6, pdl=True, pad_grid=True)
            choices = run.route(normed, router, None, lengths)
            run.down(run.gate_up(normed, choices, up, accesses), choices, down, accesses, x)

    forward()
    graph = capture(forward, torch.cuda.graph_pool_handle())
    for _ in range(20):
        given = random(n, hidden).to(dtype)
        found = []
        for launch in (forward, graph.replay, graph.replay):
            torch.cuda.synchronize()
            run._inner.fill_(torch.nan)
            run._sums.partials.fill_(torch.nan)
            x.copy_(given)
            launch()
            found.append(x.clone())
        assert found[0].isfinite().all()
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@given(
    st.integers(1, 20_000), st.integers(1, 512), st.integers(1, 16),
    st.sampled_from([ATOM_BYTES, 272, 528]), st.sampled_from([hopper(132), SMALL]),
)  # fmt: skip
def test_chunks_are_all_rows_once(
    rows: int, experts: int, top_k: int, atom_bytes: int, card: Card
) -> None:
    """A launch has up to as many rows as its kernel takes; few are SplitK_GEMM's."""
    how = {"experts": experts, "top_k": min(top_k, experts)}
    chunks = expert_chunks(rows, **how, card=card, atom_bytes=atom_bytes)
    assert chunks[0].start == 0 and chunks[-1].stop == rows
    assert all(a.stop == b.start for a, b in pairwise(chunks))
    few = few_expert_rows(**how, card=card, atom_bytes=atom_bytes)
    most = TILED_MAX_ROWS if rows > few and grouped_shape(card, atom_bytes) else few
    assert max(of.stop - of.start for of in chunks) <= most
    assert 1 <= few <= 64


@pytest.mark.parametrize(
    ("name", "few", "quantized"),
    [("qwen3-30b-a3b", 64, 64), ("mixtral-8x7b", 16, 32), ("glm-4.5-air", 64, 64)],
)
def test_experts_with_many_rows_each_are_multiplied_by_the_tiled_gemm(
    name: str, few: int, quantized: int
) -> None:
    """Mixtral's have 16 rows each of 64, of which SplitK_GEMM would need twice the time."""
    model = known_model(name)
    assert model and model.mixture
    how = {"experts": model.mixture.routing.experts, "top_k": model.mixture.routing.top_k}
    assert few_expert_rows(**how, card=hopper(132)) == few
    assert few_expert_rows(**how, card=hopper(132), atom_bytes=528) == quantized
    sizes = {"hidden": model.hidden_size, "ffn": model.mixture.ffn_size}
    for rows in (few + 1, 64):
        both = [expert_buffer_bytes(rows, **how, **sizes, quantized=of) for of in (False, True)]
        assert both[0] <= both[1]
    alone = expert_buffer_bytes(0, **how, **sizes), 64 * 4 * how["top_k"] * model.hidden_size
    assert both[1] >= sum(alone)  # a card without room for tiles keeps sums of all 64 rows


@given(
    st.integers(1, 256), st.integers(1, 512), st.integers(1, 32),
    st.sampled_from([ATOM_BYTES, 272, 528]), st.sampled_from([hopper(132), hopper(3), SMALL]),
)  # fmt: skip
def test_rings_fit(rows: int, experts: int, top_k: int, atom_bytes: int, card: Card) -> None:
    top_k = min(top_k, experts)
    splits = expert_splits((192 * experts, 8), expert_row_blocks=192, top_k=top_k, card=card)
    config = grouped_config(
        rows, splits, (TierAccess(), TierAccess(4, 65536)), experts=experts, top_k=top_k,
        card=card, atom_bytes=atom_bytes,
    )  # fmt: skip
    assert config.shared_bytes <= card.ring_bytes and config.stages >= 3
    assert all(1 <= window <= config.stages for window in config.windows)
    assert config.tier_ctas == (max(1, card.sms - 4), 4)
    assert 8 * config.x_tiles <= SPLITK_MAX_ROWS


def test_groups_divide_an_expert() -> None:
    """Of Qwen3-30B-A3B: a step of one row keeps 128 SMs of 132 busy."""
    card = hopper(132)
    gate_up, down = (
        expert_splits((128 * height,), expert_row_blocks=height, top_k=8, card=card)[0].group
        for height in (192, 256)
    )
    assert (gate_up, down) == (12, 16)
    assert [grouped_tiles(n, experts=128, top_k=8) for n in (1, 32, 64, 512)] == [1, 1, 2, 8]
