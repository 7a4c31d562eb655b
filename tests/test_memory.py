"""Tiers and partitioned matrices: every element in exactly one tier, and exactly as big."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dakrun.config import Workload
from dakrun.errors import CannotRun
from dakrun.hardware import load_profile
from dakrun.kernels import reference
from dakrun.known_models import known_model
from dakrun.memory import PartitionedTensor, Tier, allocate_tiers, tier_capacities
from dakrun.plan.items import ItemGrid
from dakrun.plan.planner import Policy, make_plan

CPU = torch.device("cpu")


def make_tiers(nbytes: int = 1 << 23) -> dict[str, Tier]:
    return {name: Tier(name, nbytes, CPU) for name in ("hbm", "host", "peer:1")}


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[str, int]]]:
    shape = (draw(st.integers(1, 300)), draw(st.integers(1, 2500)))
    count = ItemGrid(*shape).count
    cuts = sorted(draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    counts = [cuts[0], cuts[1] - cuts[0], count - cuts[1]]
    return shape, list(zip(("hbm", "host", "peer:1"), counts, strict=True))


@settings(max_examples=60, deadline=None)
@given(placements())
def test_linear_and_gather_over_any_placement(
    case: tuple[tuple[int, int], list[tuple[str, int]]],
) -> None:
    shape, placement = case
    tiers = make_tiers()
    matrix = PartitionedTensor.empty(shape, torch.float32, placement, tiers)
    dense = torch.randn(shape)
    covered = torch.zeros(shape, dtype=torch.int32)
    for part in matrix.parts:
        part.data.copy_(dense[part.rows, part.cols])
        covered[part.rows, part.cols] += 1
    assert (covered == 1).all()
    assert torch.equal(matrix.dense(), dense)
    x, bias = torch.randn(3, shape[1]), torch.randn(shape[0])
    exact = x.double() @ dense.double().T + bias.double()
    assert (reference.linear(x, matrix, bias) - exact).abs().max() < 1e-3
    ids = torch.randint(0, shape[0], (7,))
    assert torch.equal(reference.gather_rows(matrix, ids), dense[ids])


def test_parts_lie_in_the_tier_that_the_placement_names() -> None:
    tiers = make_tiers()
    matrix = PartitionedTensor.empty((256, 2048), torch.float16, [("hbm", 3), ("host", 5)], tiers)
    assert [p.tier for p in matrix.parts] == ["hbm", "hbm", "host", "host"]
    assert tiers["hbm"].used == 3 * 64 * 1024 * 2
    assert tiers["host"].used == 5 * 64 * 1024 * 2
    for part in matrix.parts:
        buffer = tiers[part.tier]._buffer
        start = buffer.data_ptr()
        assert start <= part.data.data_ptr() < start + buffer.numel()


def test_a_placement_must_cover_the_matrix() -> None:
    with pytest.raises(ValueError, match="2 items placed of a matrix of 4"):
        PartitionedTensor.empty((256, 1024), torch.float32, [("hbm", 2)], make_tiers())


def test_a_tier_never_grows() -> None:
    tier = Tier("host", 4096, CPU)
    tier.allocate((3000,), torch.uint8)
    with pytest.raises(MemoryError, match="tier host: 2000 bytes asked, 1024 left"):
        tier.allocate((2000,), torch.uint8)


def test_capacities_are_what_the_plan_says() -> None:
    model = known_model("opt-350m")
    assert model is not None
    workload = Workload(batch_size=4, prompt_len=32, new_tokens=32, max_model_len=100)
    policy = Policy(offload_ratio=0.3, kv_offload_ratio=0.5)
    plan = make_plan(model, workload, load_profile("gh200"), policy)
    sizes = tier_capacities(plan, torch.float16)
    for number, name in enumerate(plan.tiers):
        memory = plan.memory(number)
        planned = memory["weights"] + memory["kv"]
        assert planned <= sizes[name] < planned + 256 * 1000


def test_more_than_the_machine_has_is_refused_before_allocating() -> None:
    with pytest.raises(CannotRun, match=r"needs 1024\.00 TiB of host memory"):
        allocate_tiers({"hbm": 0, "host": 1 << 50}, CPU)


def test_linear_refuses_wrong_arguments() -> None:
    matrix = PartitionedTensor.empty((64, 32), torch.float32, [("hbm", 1)], make_tiers())
    with pytest.raises(ValueError, match=r"expected x \[N, 32\]"):
        reference.linear(torch.zeros(2, 31), matrix)
    with pytest.raises(ValueError, match=r"float64"):
        reference.linear(torch.zeros(2, 32, dtype=torch.float64), matrix)
    with pytest.raises(ValueError, match=r"expected bias \[64\]"):
        reference.linear(torch.zeros(2, 32), matrix, torch.zeros(63))
