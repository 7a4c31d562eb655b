"""Products with the experts that rows chose: only those are read, wherever their row blocks lie."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cards import hopper
from cases import cases
from emulated import EmulatedKernel
from packed_matrices import FEW_LAYOUTS, elsewhere, normal, packed, quantised
from torch.nn import functional as F

from dakrun.config import Routing
from dakrun.formats import PACKED16, Split, WeightFormat
from dakrun.formats.device_layout import Quantised
from dakrun.geometry import UNIT_COLS
from dakrun.kernels.experts import grouped_splitk
from dakrun.kernels.experts.grouped_splitk import PairSums, down, gate_up, multiply
from dakrun.kernels.experts.route import Routed
from dakrun.kernels.runtime import card_of, jit
from dakrun.launches import GroupedConfig, TierAccess, expert_splits, grouped_config
from dakrun.memory.matrix import TieredMatrix

HALF = torch.float16
ACCESS = (TierAccess(), TierAccess(sms=1, window_bytes=20_000), TierAccess(sms=1))


def routed(choices: Sequence[Sequence[int]], experts: int, device: str) -> Routed:
    """What the router writes for rows that choose `choices`; a row without any has no request."""
    top_k = max(map(len, choices))
    out = Routed.allocate(len(choices), Routing(experts=experts, top_k=top_k), 8, device)
    pairs = sorted((expert, row) for row, own in enumerate(choices) for expert in own)
    generator = torch.Generator().manual_seed(len(pairs))
    for tensor in (out.tokens, out.ends, out.pairs):
        tensor.fill_(-1)
    out.weights.fill_(math.nan)
    tokens = torch.tensor([row for _, row in pairs], dtype=torch.int32)
    out.tokens[: len(pairs)] = tokens.to(device)
    out.weights[: len(pairs)] = torch.rand(len(pairs), generator=generator).to(device)
    ends = [sum(expert <= number for expert, _ in pairs) for number in range(experts)]
    out.ends.copy_(torch.tensor(ends, dtype=torch.int32))
    for row, own in enumerate(choices):
        own_pairs = [pairs.index((expert, row)) for expert in sorted(own)]
        out.pairs[row, : len(own)] = torch.tensor(own_pairs, dtype=torch.int32)
    return out


def random_choices(rows: int, experts: int, top_k: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows + experts)
    return [torch.randperm(experts, generator=generator)[:top_k].tolist() for _ in range(rows)]


def matrix_of(
    experts: int, m: int, k: int, counts: Sequence[int], device: str,
    stored: WeightFormat = PACKED16, dtype: torch.dtype = HALF,
) -> TieredMatrix:  # fmt: skip
    """A random matrix of `experts`, the same wherever its row blocks lie: `counts` by tier."""
    splits = expert_splits(counts, expert_row_blocks=m // 8, top_k=2, card=card_of_device(device))
    if isinstance(stored, Quantised):
        return quantised(stored, experts * m, k, splits, dtype=dtype, device=device)
    weight = normal(experts * m, k, dtype=torch.float32, device="cpu") * k**-0.5
    return packed(weight.to(device, dtype), splits)


def card_of_device(device: str) -> Any:
    return card_of(torch.device(device))


def config_of(matrix: TieredMatrix, given: Routed, rows: int) -> GroupedConfig:
    experts, top_k = len(given.ends), given.pairs.shape[1]
    return grouped_config(
        rows, [part.split for part in matrix.parts], ACCESS[: len(matrix.parts)], experts=experts,
        top_k=top_k, card=card_of_device(str(given.ends.device)),
        atom_bytes=matrix.format.atom_bytes,
        one_unit=bool(matrix.format.macros) and matrix.shape[1] <= UNIT_COLS,
    )  # fmt: skip


def gated(choices: list[list[int]], matrix: TieredMatrix, experts: int, device: str,
          **change: Any) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """gate_up() of random rows, poisoned where there is no pair; and in float64 [pairs, M / 2]."""
    given, m = routed(choices, experts, device), matrix.shape[0] // experts
    x = normal(len(choices), matrix.shape[1], dtype=matrix.dtype, device=device)
    out = torch.full((len(given.tokens), m // 2), math.nan, dtype=matrix.dtype, device=device)
    config = dataclasses.replace(config_of(matrix, given, len(choices)), **change)
    gate_up(x, given, matrix, config, out)
    pairs = int(given.ends[-1])
    assert out[pairs:].isnan().all()
    dense = matrix.dense().view(experts, m, -1)
    numbers = torch.tensor(sorted(e for own in choices for e in own))
    rows = x.cpu()[given.tokens[:pairs].cpu().long()]
    exact = torch.einsum("pk,pmk->pm", rows.double(), dense[numbers].double())
    return out[:pairs].cpu(), F.silu(exact[:, ::2]) * exact[:, 1::2]


def added(choices: list[list[int]], matrix: TieredMatrix, experts: int, device: str,
          **change: Any) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """down() of random pairs, twice with the same counters; and in float64 [rows, M]."""
    given, m = routed(choices, experts, device), matrix.shape[0] // experts
    x = normal(len(given.tokens), matrix.shape[1], dtype=matrix.dtype, device=device)
    residual = normal(len(choices), m, dtype=matrix.dtype, device=device)
    top_k = given.pairs.shape[1]
    sums = PairSums.empty(len(choices), top_k, m, device)
    config = dataclasses.replace(config_of(matrix, given, len(choices)), **change)
    found = []
    for _ in range(2):
        sums.partials.fill_(math.nan)
        found.append(down(x, given, matrix, config, residual.clone(), sums))
        assert not sums.arrivals.any()
    assert torch.equal(*found)
    pairs, dense = int(given.ends[-1]), matrix.dense().view(experts, m, -1)
    numbers = torch.tensor(sorted(e for own in choices for e in own))
    exact = torch.einsum("pk,pmk->pm", x[:pairs].cpu().double(), dense[numbers].double())
    exact *= given.weights[:pairs, None].cpu().double()
    wanted = residual.cpu().double().index_add(0, given.tokens[:pairs].cpu().long(), exact)
    return found[0].cpu(), wanted


def stored(choices: list[list[int]], matrix: TieredMatrix, experts: int, device: str,
           **change: Any) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """multiply() of random pairs; and in float64 [pairs, M]."""
    given, m = routed(choices, experts, device), matrix.shape[0] // experts
    pairs = int(given.ends[-1])
    x = normal(pairs, matrix.shape[1], dtype=matrix.dtype, device=device)
    out = torch.full((pairs, m), math.nan, dtype=matrix.dtype, device=device)
    config = dataclasses.replace(config_of(matrix, given, len(choices)), **change)
    multiply(x, given.ends, matrix, config, out)
    dense = matrix.dense().view(experts, m, -1)
    numbers = torch.tensor(sorted(e for own in choices for e in own))
    return out.cpu(), torch.einsum("pk,pmk->pm", x.cpu().double(), dense[numbers].double())


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


CHOICES = {
    "one row": [[5, 0, 3]],
    "all rows to one expert": [[2]] * 19,
    "nine rows": random_choices(9, 6, 2),
    "a row without a request": [[1, 4], [], [4, 5]],
}


@pytest.mark.parametrize("run", [gated, added, stored])
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(("m", "k"), [(24, 200), (144, 328)])
def test_it_is_exact(
    run: Any, choices: list[list[int]], m: int, k: int, kernel_device: str
) -> None:
    """In one tier, and in three that cut experts: no bit depends on it."""
    count = 6 * m // 8
    found, exact = run(choices, matrix_of(6, m, k, (count,), kernel_device), 6, kernel_device)
    assert error(found, exact) < 1e-3
    for counts in [(count - count // 2, count // 2), (0, count), (7, 5, count - 12)]:
        matrix = matrix_of(6, m, k, counts, kernel_device)
        assert run(choices, matrix, 6, kernel_device)[0].equal(found), counts


@pytest.mark.parametrize(
    ("rows", "layout", "run"),
    cases(
        itertools.product((1, 13), FEW_LAYOUTS, (gated, added, stored)),
        lambda rows, layout, run: rows == 13 or run is added,
    ),
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_formats(rows: int, layout: Quantised, run: Any, kernel_device: str) -> None:
    choices, dtype = random_choices(rows, 5, 3), torch.bfloat16
    matrix = matrix_of(5, 40, 648, (25,), kernel_device, layout, dtype)
    found, exact = run(choices, matrix, 5, kernel_device)
    assert error(found, exact) < 1e-2
    other = matrix_of(5, 40, 648, (13, 12), kernel_device, layout, dtype)
    assert run(choices, other, 5, kernel_device)[0].equal(found)


@pytest.mark.parametrize("run", [gated, added, stored])
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize(
    "layout", cases(zip(FEW_LAYOUTS), lambda layout: layout is FEW_LAYOUTS[0]), ids=str
)
def test_a_k_of_one_unit(layout: Quantised, rows: int, run: Any, kernel_device: str) -> None:
    """Warps divide row blocks, not K: an item has up to 64, whatever their groups."""
    choices = random_choices(rows, 5, 3)
    for m in (152, 528):
        matrix = matrix_of(5, m, 128, (5 * m // 8,), kernel_device, layout, torch.bfloat16)
        found, exact = run(choices, matrix, 5, kernel_device)
        assert error(found, exact) < 1e-2
        few = run(choices, matrix, 5, kernel_device, tier_ctas=(3,))[0]  # items of whole experts
        assert few.equal(found)
        two = (5 * m // 8 - 21, 21)
        other = matrix_of(5, m, 128, two, kernel_device, layout, torch.bfloat16)
        assert run(choices, other, 5, kernel_device)[0].equal(found)


@pytest.mark.parametrize("run", [gated, added])
@pytest.mark.parametrize(("m", "layout"), [(80, None), (144, FEW_LAYOUTS[0])], ids=str)
def test_experts_lie_elsewhere_than_at_their_indices(
    run: Any, m: int, layout: Quantised | None, kernel_device: str
) -> None:
    """Those that are not cut are one piece each, alike in all tiers; their addresses have NaN."""
    choices, height = random_choices(9, 6, 2), m // 8
    counts = (2 * height + 3, 3 * height, height - 3)
    matrix = matrix_of(6, m, 200, counts, kernel_device, layout or PACKED16)
    wanted, _ = run(choices, matrix, 6, kernel_device)
    moved, copies = elsewhere(matrix, 6, kernel_device)
    assert len(copies) == 4, "two are cut"
    found, _ = run(choices, moved, 6, kernel_device)
    assert found.equal(wanted)


@pytest.mark.parametrize("run", [gated, added, stored])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_an_expert_with_more_rows_than_tiles_reads_its_matrix_again(
    run: Any, tiles: int, kernel_device: str
) -> None:
    choices = [[0, 3] if row % 3 else [3, 1] for row in range(40)]
    matrix = matrix_of(4, 16, 136, (5, 3), kernel_device)
    found, exact = run(choices, matrix, 4, kernel_device, x_tiles=tiles)
    assert error(found, exact) < 1e-3


@pytest.mark.parametrize("run", [gated, added])
def test_local_ctas_read_a_tier_without_ctas(run: Any, kernel_device: str) -> None:
    choices = random_choices(9, 6, 2)
    matrix = matrix_of(6, 80, 200, (20, 15, 25), kernel_device)
    wanted, _ = run(choices, matrix, 6, kernel_device)
    ctas = config_of(matrix, routed(choices, 6, kernel_device), 9).tier_ctas
    for change in ((ctas[0] + 1, 0, ctas[2]), (sum(ctas), 0, 0)):
        assert run(choices, matrix, 6, kernel_device, tier_ctas=change)[0].equal(wanted)


def test_a_row_does_not_depend_on_the_others(kernel_device: str) -> None:
    """With the same tiles of X."""
    choices = random_choices(7, 6, 2)
    matrix = matrix_of(6, 80, 200, (41, 19), kernel_device)
    together, _ = gated(choices, matrix, 6, kernel_device)
    alone, _ = gated([choices[0], *[[]] * 6], matrix, 6, kernel_device)
    pairs = sorted((expert, row) for row, own in enumerate(choices) for expert in own)
    assert alone.equal(together[[number for number, (_, row) in enumerate(pairs) if row == 0]])


def test_experts_that_no_row_chose_are_not_read(kernel_device: str) -> None:
    """NaN in them changes nothing."""
    matrix = matrix_of(6, 48, 128, (20, 16), kernel_device)
    wanted, _ = gated([[1, 4]], matrix, 6, kernel_device)
    rows = torch.full((6, 48, 128), math.nan, dtype=HALF)
    rows[[1, 4]] = matrix.dense().view(6, 48, 128)[[1, 4]]
    poisoned = packed(rows.view(-1, 128).to(kernel_device), [part.split for part in matrix.parts])
    assert gated([[1, 4]], poisoned, 6, kernel_device)[0].equal(wanted)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ctas_arrive_in_any_order(seed: int, kernel_device: str) -> None:
    choices = random_choices(11, 6, 3)
    matrix = matrix_of(6, 80, 200, (41, 19), kernel_device)
    wanted, _ = added(choices, matrix, 6, kernel_device)
    tiles = config_of(matrix, routed(choices, 6, kernel_device), 11).x_tiles
    kernel = jit.kernel(
        grouped_splitk.SOURCE, "grouped_splitk", grouped_splitk.defines(HALF, tiles, "added")
    )
    if isinstance(kernel, EmulatedKernel):
        kernel.seed, kernel.together = seed, 3
    assert added(choices, matrix, 6, kernel_device)[0].equal(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64).half()}, r"x as \[3, 128\]"),
        ({"out": torch.zeros(6, 23).half()}, r"out as \[6, 24\]"),
        ({"out": torch.zeros(4, 24).half()}, "room for the 6 pairs"),
        ({"weight": packed(torch.zeros(240, 128).half(), [Split(30, 2)])}, "expert after expert"),
        ({"weight": packed(torch.zeros(60, 128).half(), [Split(8)])}, "whole row blocks"),
        ({}, "current GPU"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    split = Split(30, height=6)
    choices, weight = [[0, 1]] * 3, packed(torch.zeros(240, 128).half(), [split])
    given: dict[str, Any] = {
        "x": torch.zeros(3, 128).half(), "weight": weight, "out": torch.zeros(6, 24).half(),
        "routed": routed(choices, 5, "cpu"),
    }  # fmt: skip
    config = grouped_config(
        3, [part.split for part in weight.parts], ACCESS[:1], experts=5, top_k=2, card=hopper(3)
    )
    with pytest.raises(ValueError, match=message):
        gate_up(**{**given, **change}, config=config)
