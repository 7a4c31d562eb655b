"""The router's kernel chooses as plain torch does, and lists the rows of each expert in order."""

from typing import Any

import pytest
import torch
from cards import hold_to, hopper
from emulated import EmulatedKernel
from packed_matrices import normal

from dakrun.config import Routing
from dakrun.kernels.experts import reference as experts
from dakrun.kernels.experts.route import SOURCE, Routed, defines, route
from dakrun.kernels.runtime import DTYPES, jit

SOFTMAX = {"scores": "softmax"}
GROUPED = {"scores": "sigmoid", "biased": True, "groups": 8, "top_groups": 3, "scale": 2.5}
CASES = [
    (1, 8, 2, SOFTMAX),
    (7, 128, 8, SOFTMAX),
    (33, 60, 4, {**SOFTMAX, "renormalized": False}),
    (32, 64, 8, GROUPED),
    (70, 136, 5, {"scores": "sigmoid", "biased": True, "renormalized": False}),
    pytest.param(4096, 128, 8, SOFTMAX, marks=pytest.mark.gpu),
    pytest.param(4095, 512, 32, GROUPED, marks=pytest.mark.gpu),
]


def room(x: torch.Tensor, rule: Routing, more: int = 0) -> Routed:
    """Room for the choices of x, and of `more` rows."""
    return Routed.allocate(len(x) + more, rule, x.shape[1], x.device)


def choices(out: Routed, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [n, k], ascending, and their weights; -1 and 0 in rows without a request.

    Checks that the pairs of each expert are its rows, in order, and that `pairs` lead to them.
    """
    ends, pairs = out.ends.tolist(), out.pairs[:n].cpu()
    tokens, weights = out.tokens[: ends[-1]].cpu(), out.weights[: ends[-1]].cpu()
    counts = torch.tensor([b - a for a, b in zip([0, *ends], ends, strict=False)])
    of_pairs = torch.arange(len(ends)).repeat_interleave(counts)
    for rows in tokens.split(counts.tolist()):
        assert rows.equal(rows.unique()), "each row once, ascending"
    assert sorted(pairs[pairs >= 0].tolist()) == list(range(ends[-1]))
    owner = torch.arange(n)[:, None].expand_as(pairs)
    assert tokens[pairs[pairs >= 0]].equal(owner[pairs >= 0].int())
    found = torch.where(pairs >= 0, of_pairs[pairs.clamp(min=0)], -1)
    assert (found.diff(dim=1) > 0)[pairs[:, 0] >= 0].all()
    return found, torch.where(pairs >= 0, weights[pairs.clamp(min=0)], 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "count", "top_k", "rule"), CASES)
def test_it_chooses_as_plain_torch_does(
    n: int, count: int, top_k: int, rule: dict[str, Any], dtype: torch.dtype, kernel_device: str
) -> None:
    rule = Routing(experts=count, top_k=top_k, **rule)
    x = normal(n, 72, dtype=dtype, device=kernel_device)
    weight = normal(count, 72, dtype=torch.float32, device=kernel_device)
    bias = normal(count, dtype=torch.float32, device=kernel_device) if rule.biased else None
    out = room(x, rule, 3)
    for _ in range(2):  # scratch is left as it was
        assert route(x, weight, rule, out, bias=bias) is out
        found, weights = choices(out, n)
        assert all((out.scratch[of].view(torch.int32) == -1).all() for of in ("logits", "chosen"))
    logits = x.double() @ weight.double().T
    wide = None if bias is None else bias.double()
    chosen, wanted = experts.choose(logits, wide, rule)
    order = chosen.sort(1)
    assert (found == order.values.cpu()).all(1).float().mean() > 0.999
    same = (found == order.values.cpu()).all(1)
    expected = wanted.gather(1, order.indices).cpu().float()
    torch.testing.assert_close(weights[same], expected[same], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sms", [3, 132])
def test_a_row_does_not_depend_on_the_others(
    sms: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on which CTAs there are; columns are divided among them."""
    if kernel_device == "cpu":
        hold_to(hopper(sms), monkeypatch)
    rule = Routing(experts=24, top_k=3)
    x = normal(100, 1096, dtype=torch.bfloat16, device=kernel_device)
    weight = normal(24, 1096, dtype=torch.float32, device=kernel_device)
    together = choices(route(x, weight, rule, room(x, rule)), 100)
    for rows in ([0], [9], [99], [*range(30, 94)]):
        found, weights = choices(route(x[rows], weight, rule, room(x[rows], rule)), len(rows))
        assert found.equal(together[0][rows]) and weights.equal(together[1][rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_exact_in_float32(dtype: torch.dtype, kernel_device: str) -> None:
    """Weights have 24 bits. A sum has one term here; scores of logits below -8 show its error."""
    rule = Routing(experts=16, top_k=16, scores="sigmoid", renormalized=False)
    weight = -8 - normal(16, 40, dtype=torch.float32, device=kernel_device).abs()
    x = torch.zeros(40, 40, dtype=dtype, device=kernel_device)
    x.diagonal().fill_(1 + torch.finfo(dtype).eps)
    found, weights = choices(route(x, weight, rule, room(x, rule)), 40)
    assert (found == torch.arange(16)).all()
    wanted = (x.double() @ weight.double().T).sigmoid().cpu().float()
    torch.testing.assert_close(weights, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lowest_indexes(scores: Any, kernel_device: str) -> None:
    """All rows choose the same experts; others have none."""
    rule = Routing(experts=40, top_k=4, scores=scores)
    x = torch.ones(34, 8, dtype=torch.float16, device=kernel_device)
    weight = torch.zeros(40, 8, device=kernel_device)
    weight[33], weight[38] = 0.5, -0.0
    out = route(x, weight, rule, room(x, rule))
    found, weights = choices(out, 34)
    assert found.tolist() == [[0, 1, 2, 33]] * 34
    assert out.ends.tolist() == [34, 68, *[102] * 31, *[136] * 7]
    assert (weights[:, 3] > weights[:, 0]).all() and weights.sum(1).allclose(torch.ones(34))


def test_the_best_groups_of_equal_ones_are_the_first(kernel_device: str) -> None:
    """A group counts by its two best, not by its best alone."""
    rule = Routing(
        experts=24, top_k=4, scores="sigmoid", groups=6, top_groups=2, renormalized=False
    )
    x = torch.ones(1, 8, dtype=torch.float16, device=kernel_device)
    weight = torch.zeros(24, 8, device=kernel_device)
    weight[8] = 0.2  # alone in group 2
    weight[[13, 15]] = 0.15  # both in group 3
    out = route(x, weight, rule, room(x, rule))
    assert choices(out, 1)[0].tolist() == [[8, 9, 13, 15]]
    wanted = experts.choose(x.float() @ weight.T, None, rule)[0].sort(1).values
    assert wanted.tolist() == [[8, 9, 13, 15]]


def test_rows_without_a_request_choose_none(kernel_device: str) -> None:
    rule = Routing(experts=16, top_k=2)
    x = normal(40, 16, dtype=torch.bfloat16, device=kernel_device)
    weight = normal(16, 16, dtype=torch.float32, device=kernel_device)
    everyone = choices(route(x, weight, rule, room(x, rule)), 40)
    lengths = torch.arange(40, dtype=torch.int32, device=kernel_device)
    idle = torch.tensor([0, 3, 31, 32, 39])
    lengths[idle], x[idle] = -1, torch.nan
    out = room(x, rule)
    found, weights = choices(route(x, weight, rule, out, lengths=lengths), 40)
    others = [row for row in range(40) if row not in idle]
    assert found[others].equal(everyone[0][others])
    assert weights[others].equal(everyone[1][others])
    assert (found[idle] == -1).all() and int(out.ends[-1]) == 2 * 35


def test_a_row_of_nan_chooses_experts_all_the_same(kernel_device: str) -> None:
    rule = Routing(experts=16, top_k=3)
    x = normal(3, 16, dtype=torch.bfloat16, device=kernel_device)
    x.view(torch.int16)[1] = -1  # NaN, as scratch is before it is written
    weight = normal(16, 16, dtype=torch.float32, device=kernel_device)
    found, weights = choices(route(x, weight, rule, room(x, rule)), 3)
    assert found[1].tolist() == [0, 1, 2] and weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize("top_k", [1, 5])
def test_experts_stacked_in_another_order(top_k: int, kernel_device: str) -> None:
    """Pairs go by stack index; choices, their counts, and the order of a row's pairs, by number."""
    rule = Routing(experts=24, top_k=top_k, scores="sigmoid", groups=3, top_groups=2)
    x = normal(37, 40, dtype=torch.bfloat16, device=kernel_device)
    weight = normal(24, 40, dtype=torch.float32, device=kernel_device)
    weight[[5, 20, 3]] = weight[4].clone()  # equal scores
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    stacked = order.argsort().int().to(kernel_device)
    plain, other = (room(x, rule) for _ in range(2))
    use = torch.ones(2, 24, dtype=torch.int32, device=kernel_device)
    lengths = torch.arange(37, dtype=torch.int32, device=kernel_device)
    lengths[9] = -1
    route(x, weight, rule, plain, lengths=lengths)
    for _ in range(2):
        route(x, weight, rule, other, lengths=lengths, stacked=stacked, use=use)
    counts = [torch.diff(of.ends.cpu(), prepend=torch.tensor([0])) for of in (plain, other)]
    assert counts[1].equal(counts[0][order].int())
    assert (use[0].cpu() - 1).equal(2 * counts[0].int()) and (use[1].cpu() - 1).equal(
        2 * (counts[1] > 0).int()
    )
    found = []
    for out, of in zip((plain, other), counts, strict=True):
        by_index = torch.arange(24).repeat_interleave(of)
        pairs = out.pairs.cpu()
        at = by_index[pairs.clamp(min=0)]
        found.append((at if out is plain else order[at], out.weights.cpu()[pairs.clamp(min=0)]))
        rows = torch.arange(37)[:, None].expand_as(pairs)
        assert out.tokens.cpu()[pairs[pairs >= 0]].equal(rows[pairs >= 0].int())
    has = plain.pairs.cpu() >= 0
    assert has.equal(other.pairs.cpu() >= 0) and has.sum() == 36 * top_k
    assert found[0][0][has].equal(found[1][0][has]) and found[0][1][has].equal(found[1][1][has])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 16)}, r"x as \[N, H\] in 16 bits"),
        ({"x": torch.zeros(2, 12).half()}, "a multiple of 8"),
        ({"weight": torch.zeros(8, 16).half()}, r"weight as \[8, 16\] of torch.float32"),
        ({"weight": torch.zeros(8 * 16 + 1)[1:].view(8, 16)}, "weight to be aligned to 16 bytes"),
        ({"bias": torch.zeros(9)}, r"bias as \[8\] of torch.float32"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths as \[2\]"),
        ({"stacked": torch.zeros(9, dtype=torch.int32)}, r"stacked as \[8\]"),
        ({"use": torch.zeros(2, 9, dtype=torch.int32)}, r"use as \[2, 8\]"),
        ({"out": Routed.allocate(1, Routing(experts=8, top_k=2), 16, "cpu")}, "pairs as"),
        ({"out": Routed.allocate(2, Routing(experts=8, top_k=2), 600, "cpu")}, "logits as"),
        ({"routing": Routing(experts=520, top_k=2)}, "up to 512 experts"),
        ({}, "current GPU"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    rule = Routing(experts=8, top_k=2)
    given = {
        "x": torch.zeros(2, 16).half(), "weight": torch.zeros(8, 16), "routing": rule,
        "out": Routed.allocate(2, rule, 16, "cpu"),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        route(**(given | change))


@pytest.mark.parametrize(("n", "sms"), [(67, 3), (40, 15)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ctas_arrive_in_any_order(
    seed: int, n: int, sms: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device == "cpu":
        hold_to(hopper(sms), monkeypatch)
    rule = Routing(experts=40, top_k=3)
    x = normal(n, 520, dtype=torch.bfloat16, device=kernel_device)
    weight = normal(40, 520, dtype=torch.float32, device=kernel_device)
    first = choices(route(x, weight, rule, room(x, rule)), n)
    for name in ("route", "number_pairs"):
        kernel = jit.kernel(SOURCE, name, defines(x.dtype, 40))
        if isinstance(kernel, EmulatedKernel):
            monkeypatch.setattr(kernel, "seed", seed)
            monkeypatch.setattr(kernel, "together", 7)
    again = choices(route(x, weight, rule, room(x, rule)), n)
    assert again[0].equal(first[0]) and again[1].equal(first[1])
