"""The shipped profile of an H200 against what was measured on it and on other cards of its kind."""

import pytest

from dakrun.config import Workload
from dakrun.hardware import HardwareProfile, load_profile
from dakrun.known_models import known_model
from dakrun.plan.ops import Op
from dakrun.plan.planner import Policy, make_plan
from dakrun.plan.roofline import predicted_time

KIB, MIB = 2**10, 2**20
PROFILE = load_profile("h200-pcie5")

# Decode steps of reads alone, on an H200 whose HBM gives CARD_RATE: layers, elements of the five
# ops of a layer, seconds of one kernel that reads them all, and the share of that rate that the ops
# reach as overlapping launches (programmatic dependent launch) in a CUDA graph.
CARD_RATE = 4.61e12
STEPS = {
    "opt-6.7b": (32, (3 * 4096**2, 2**21, 4096**2, 4 * 4096**2, 4 * 4096**2), 2.83e-3, 0.958),
    "opt-30b": (
        48, (3 * 7168**2, 3 * 2**20, 7168**2, 4 * 7168**2, 4 * 7168**2), 12.95e-3, 0.987,
    ),
    "llama-2-7b": (
        32, (3 * 4096**2, 2**21, 4096**2, 2 * 4096 * 11008, 4096 * 11008), 2.85e-3, 0.961,
    ),
    "llama-3-8b": (
        32, (6144 * 4096, 2**20, 4096**2, 2 * 4096 * 14336, 4096 * 14336), 3.05e-3, 0.956,
    ),
}  # fmt: skip


def bound(nbytes: float) -> float:
    """Seconds that reading takes at least."""
    return nbytes / PROFILE.hbm_bytes_per_s


def predicted(nbytes: float) -> float:
    """Seconds that the plan expects of a linear op that reads `nbytes` of HBM."""
    op = Op(
        name="read", category="linear", layers=1, in_layer=True, shape=(64, 64), batch_size=8,
        element_bytes=2, resident_bytes=int(nbytes), read_bytes=nbytes, flops=1.0, units=1,
    )  # fmt: skip
    return predicted_time(op, bound(nbytes), PROFILE)


def test_its_own_chains() -> None:
    chain = PROFILE.sweeps["chain"]
    columns = map(chain.column, ("op_bytes", "overlap", "op_s"))
    measured = {size: op_s for size, overlap, op_s in zip(*columns, strict=True) if overlap}
    sizes = [size for size in measured if size >= 8 * MIB]
    assert len(sizes) >= 5
    for size in sizes:
        assert predicted(size) == pytest.approx(measured[size], rel=0.05), size


@pytest.mark.parametrize("model", STEPS)
def test_decode_steps_of_another_card(model: str) -> None:
    layers, elements, one_read, share = STEPS[model]
    in_one = layers * sum(bound(2 * n) for n in elements)
    as_ops = layers * sum(predicted(2 * n) for n in elements)
    assert in_one == pytest.approx(one_read, rel=0.05)
    assert as_ops == pytest.approx(one_read / share, rel=0.05)
    slower = PROFILE.hbm_bytes_per_s / CARD_RATE
    assert slower * in_one == pytest.approx(one_read, rel=0.01)
    assert slower * as_ops == pytest.approx(one_read / share, rel=0.02)


@pytest.mark.parametrize("model", STEPS)
def test_small_batches_wait_for_bytes(model: str) -> None:
    workload = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    plan = make_plan(known_model(model), workload, PROFILE, Policy(offload_ratio=0.0))
    for op in plan.weights():
        assert op.regime == "memory-bound"
        assert list(op.bounds_s) == pytest.approx([bound(op.op.read_bytes)] * op.op.layers)


def shows_what_the_method_rests_on(profile: HardwareProfile) -> None:
    """Asserts the facts behind windows and multicast on the sweeps of a GPU on PCIe."""
    host = profile.tier("host")
    assert 128 * KIB <= host.window_bytes <= MIB
    assert host.sms <= profile.sms // 8
    names = ("in_flight_bytes", "hbm_bytes_per_s")
    grid = list(zip(*map(profile.sweeps["host congestion"].column, names), strict=True))
    crowded = [rate for in_flight, rate in grid if in_flight >= 2 * MIB]
    assert min(crowded) <= 0.75 * profile.hbm_bytes_per_s, "too many bytes in flight starve HBM"
    shared = profile.sweeps["host amplification"]
    for readers, delivered in zip(
        shared.column("readers"), shared.column("delivered_bytes_per_s"), strict=True
    ):
        amplification = host.direct_bytes_per_s * readers / delivered
        assert amplification == pytest.approx(readers, rel=0.1), "L2 does not keep host memory"
    cast = profile.sweeps["host multicast"]
    by_size = dict(zip(cast.column("cluster"), cast.column("delivered_bytes_per_s"), strict=True))
    assert by_size[8] >= 6 * host.direct_bytes_per_s


def test_its_sweeps() -> None:
    shows_what_the_method_rests_on(PROFILE)
    assert {"hbm", "l2", "host direct", "chain", "matmul float16"} <= set(PROFILE.sweeps)
    assert (PROFILE.provenance.kind, PROFILE.provenance.date) == ("measured", "2026-11-21")
