"""Plans of large batches: the profile's costs of many rows, norms, sampling and staging count."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.config import ModelConfig, Workload
from dakrun.hardware import Card, HardwareProfile, OpCosts, load_profile
from dakrun.launches import TierAccess, tiled_config
from dakrun.models import known_model
from dakrun.plan import (
    Links,
    Plan,
    Policy,
    bytes_ahead,
    compute_time,
    decode_ops,
    linear_op,
    make_plan,
    predicted_time,
    ring_bytes,
)
from dakrun.plan.many_rows import many_rows_sms, many_rows_times
from dakrun.plan.op_costs import waits_s
from dakrun.plan.roofline import WHOLE_WAIT, kernel_compute_time, sampling_time

MANY = OpCosts(rows=(128, 512), seconds=(8e-6, 4e-6), efficiency=(0.9, 0.8))
NORM = OpCosts(rows=(128, 512), seconds=(3e-6, 5e-6), efficiency=(0.5, 1.0))
SAMPLING = OpCosts(rows=(8, 512), seconds=(2e-6, 6e-6), efficiency=(0.25, 1.0))

PEER = load_profile("h200-nvlink-peer")
BEFORE = replace(PEER, many_rows=None, norm=None, sampling=None)
AFTER = replace(PEER, many_rows=MANY, norm=NORM, sampling=SAMPLING)
RATE = PEER.hbm_bytes_per_s


def model(name: str = "opt-6.7b") -> ModelConfig:
    found = known_model(name)
    assert found is not None
    return found


def work(batch_size: int) -> Workload:
    return Workload(batch_size=batch_size, prompt_len=32, new_tokens=32, max_model_len=64)


def plan(batch_size: int, profile: HardwareProfile, **policy: object) -> Plan:
    return make_plan(model(), work(batch_size), profile, Policy(**policy))  # type: ignore[arg-type]


def test_few_rows_do_not_ask_for_many() -> None:
    for n in (1, 8, 64):
        op = linear_op("m", (4096, 4096), n=n, element_bytes=2)
        assert predicted_time(op, 1e-5, AFTER) == predicted_time(op, 1e-5, BEFORE)
        assert kernel_compute_time(op, 1e-5, AFTER) == 1e-5


def test_many_rows_have_costs_of_their_own() -> None:
    op = linear_op("m", (4096, 4096), n=512, element_bytes=2)
    assert kernel_compute_time(op, 4e-5, AFTER) == pytest.approx(5e-5)
    assert predicted_time(op, 4e-5, AFTER) == pytest.approx(5.4e-5)
    assert predicted_time(op, 4e-5, AFTER, link=1e-3) == pytest.approx(1e-3 + 4e-6)
    seconds, efficiency = BEFORE.linear.at(512)
    expected = 4e-5 / efficiency + seconds
    assert predicted_time(op, 4e-5, BEFORE) == pytest.approx(expected), "no costs of many rows"


def test_a_norm_ahead_adds_to_an_op() -> None:
    for n, seconds, efficiency in ((8, 3e-6, 0.5), (512, 5e-6, 1.0)):
        op = linear_op("m", (8192, 4096), n=n, element_bytes=2)
        normed = replace(op, normed=True)
        added = predicted_time(normed, 1e-5, AFTER) - predicted_time(op, 1e-5, AFTER)
        assert added == pytest.approx(seconds + 2 * n * 4096 * 2 / RATE / efficiency)
    assert predicted_time(normed, 1e-5, BEFORE) == predicted_time(op, 1e-5, BEFORE)


@pytest.mark.parametrize("name", ["opt-6.7b", "llama-3-8b"])
def test_which_ops_have_a_norm_ahead(name: str) -> None:
    ops = decode_ops(model(name), work(512))
    assert {op.name for op in ops if op.normed} & {"qkv", "lm_head", "o", "fc2", "down"} == {
        "qkv", "lm_head",
    }  # fmt: skip
    assert sum(op.normed for op in ops) == 3


def test_sampling_reads_logits() -> None:
    llama = model("llama-3-8b")
    expected = 8 * 128_256 * 2 / RATE / 0.25 + 2e-6
    assert sampling_time(llama, 8, AFTER) == pytest.approx(expected)
    assert sampling_time(llama, 8, BEFORE) == 0
    found = make_plan(llama, work(8), AFTER, Policy(offload_ratio=0.0))
    assert found.sampling_s == pytest.approx(expected)
    assert found.predicted_s == pytest.approx(
        sum(sum(op.predicted_s) for op in found.ops) + expected
    )


def test_bounds_are_of_the_profiles_rates() -> None:
    before, after = (plan(512, profile, offload_ratio=0.0) for profile in (BEFORE, AFTER))
    assert before.bound_s == after.bound_s
    for op in after.weights():
        compute = compute_time(op.op, PEER, "float16")
        assert op.bounds_s[0] == pytest.approx(max(compute, op.op.read_bytes / RATE))
        assert op.predicted_s[0] > op.bounds_s[0] / 0.8


def test_thresholds_are_of_the_kernels_rate() -> None:
    """A product that takes longer hides more of the link."""
    before, after = (plan(512, profile, remote=("peer",)) for profile in (BEFORE, AFTER))
    for op in ("qkv", "fc1", "fc2"):
        assert after.op(op).b == pytest.approx(before.op(op).b / 0.8)
        assert after.op(op).a == 0


def test_staging_costs_what_the_profile_says() -> None:
    slow = replace(PEER, staged_seconds=1e-3)  # of which small parts have a share
    for profile in (PEER, slow):
        direct, staged = (
            plan(8, profile, offload_ratio=0.1, kv_offload_ratio=0.0, transport=transport)
            for transport in ("direct", "staged")
        )
        for op in staged.weights():
            assert op.transport == "staged"
            counts = op.placement[0]
            bytes_there = op.op.tier_bytes(counts)[1]
            link = bytes_there / profile.tier("host").staged_bytes_per_s
            here = (op.op.read_bytes + bytes_there) / profile.hbm_bytes_per_s
            here = max(here, compute_time(op.op, profile, "float16"))
            # Small parts are copied in groups, which share a wait.
            share = min(1, max(bytes_there / WHOLE_WAIT, 1 / op.op.layers))
            kernel = predicted_time(op.op, here, profile) + share * profile.staged_seconds
            assert op.predicted_s[0] == pytest.approx(max(kernel, link))
        either = plan(8, profile, offload_ratio=0.1, kv_offload_ratio=0.0)
        assert either.predicted_s <= min(direct.predicted_s, staged.predicted_s) * (1 + 1e-9)
    assert {op.transport for op in plan(8, slow, offload_ratio=0.1).weights()} == {"direct"}


def test_without_clusters_each_tile_of_x_reads_the_remote_part_again() -> None:
    """So that staging it is faster for many rows; torch reads it once, from unpacked pieces."""

    def link(n: int, card: Card) -> float:
        op = linear_op("m", (4096, 4096), n=n, element_bytes=2)
        small = load_profile("rtx-pro-6000")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HardwareProfile, "card", card)
            found = many_rows_times(op, (448, 64), (180, 8), 1e-9, small, ["host"])[1]
        return found - small.kernel_model.launch_gap_seconds

    card = load_profile("rtx-pro-6000").card
    once = link(65, card)
    for n, reads in ((128, 1), (129, 2), (512, 4), (4096, 32)):
        assert link(n, card) == pytest.approx(reads * once)
        assert link(n, replace(card, tiled_rows=64)) == pytest.approx(once)
        assert link(n, replace(card, clusters=(94, 50))) <= reads * once


@pytest.mark.parametrize("n", [128, 256, 512, 1024, 4096, 8192])
def test_rings_are_the_kernels(n: int) -> None:
    """An SM of a remote part brings what the ring of its CTA in the kernel's launch holds."""
    tier, units = AFTER.tier("peer:1"), 896
    op = linear_op("m", (8 * units, 7168), n=n, element_bytes=2)
    access = TierAccess(), TierAccess(8, tier.window_bytes)
    (launch,) = tiled_config(min(n, 4096), (0, units), access, cols=7168, card=AFTER.card).launches
    held = 1024 * launch.stages * launch.shape.row_blocks / launch.shape.x_ctas
    latency = AFTER.kernel_model.link_latency_seconds
    _, link = many_rows_times(op, (0, units), (0, 1), 0.0, AFTER, ("peer:1",))
    expected = op.read_bytes * latency / held + AFTER.kernel_model.launch_gap_seconds
    assert link == pytest.approx(expected)


@given(
    st.sampled_from([128, 512, 1024, 4096]),
    st.lists(st.integers(0, 600), min_size=2, max_size=3).filter(any),
)
def test_every_part_has_sms_and_no_more_than_help(n: int, counts: list[int]) -> None:
    remote = ("peer:1", "host")[: len(counts) - 1]
    op = linear_op("m", (8 * sum(counts), 4096), n=n, element_bytes=2)
    compute = compute_time(op, AFTER, "float16")
    sms = many_rows_sms(op, counts, compute, AFTER, remote)
    assert [count > 0 for count in counts] == [given > 0 for given in sms]
    assert sum(sms) <= AFTER.sms
    assert not counts[0] or sum(sms) == AFTER.sms
    if len(counts) > 2 or not counts[0] or not counts[1]:
        return

    def seconds(far: int) -> float:
        shared = AFTER.sms - far, far
        kernel, link = many_rows_times(op, counts, shared, compute, AFTER, remote)
        return max(kernel_compute_time(op, kernel, AFTER), link)

    best = min(seconds(far) for far in range(1, AFTER.sms))
    assert seconds(sms[1]) == pytest.approx(best)


def test_parts_slow_each_other_down() -> None:
    op = linear_op("m", (16384, 4096), n=512, element_bytes=2)
    compute = compute_time(op, AFTER, "float16")
    kernel, link = many_rows_times(op, (1024, 1024), (66, 66), compute, AFTER, ("peer:1",))
    assert kernel == pytest.approx(compute)
    at_full_rate = op.read_bytes / 2 / AFTER.tier("peer:1").direct_bytes_per_s
    gap = AFTER.kernel_model.launch_gap_seconds
    assert link == pytest.approx(at_full_rate + gap)
    fewer = many_rows_times(op, (1024, 1024), (122, 10), compute, AFTER, ("peer:1",))
    assert fewer[0] == pytest.approx(6.6 * compute) and fewer[1] > 2 * at_full_rate


@pytest.mark.parametrize(("profile", "remote"), [("h200-pcie5", "host"), (PEER.name, "peer")])
@pytest.mark.parametrize("batch_size", [8, 512])
def test_auto_is_predicted_as_fast_as_the_faster_strategy(
    profile: str, remote: str, batch_size: int
) -> None:
    machine = load_profile(profile)
    for ratio in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        options = {"offload_ratio": ratio, "remote": (remote,)}
        auto, greedy, uniform = (
            plan(batch_size, machine, strategy=strategy, **options)
            for strategy in ("auto", "greedy", "uniform")
        )
        assert auto.predicted_s == min(greedy.predicted_s, uniform.predicted_s)
        assert greedy.ratio == pytest.approx(uniform.ratio, abs=0.002 if batch_size > 8 else 0.02)


def test_direct_and_staged_reads_wait_for_each_other() -> None:
    """So a step mixes them only where that is worth it; both wait as long as the shorter takes."""
    for batch_size in (8, 64, 512):
        options = [
            plan(batch_size, AFTER, offload_ratio=0.05, kv_offload_ratio=0.0, transport=transport)
            for transport in ("direct", "staged", None)
        ]
        assert [one.waits_s for one in options[:2]] == [0, 0]
        assert options[2].predicted_s <= min(one.predicted_s for one in options[:2])
    tier = AFTER.tier("host")
    mixed = replace(options[0], ops=(*options[0].ops[:3], *options[1].ops[3:]))
    rates = {"direct": tier.direct_bytes_per_s, "staged": tier.staged_bytes_per_s}
    needed = [
        sum(op.read_bytes(1) for op in mixed.weights() if op.transport == transport) / rate
        for transport, rate in rates.items()
    ]
    assert waits_s(mixed.ops, Links.of(AFTER, ("host",))) == pytest.approx(min(needed))


def ahead(found: Plan) -> int:
    return bytes_ahead(found.ops, found.profile, found.tiers[1:], found.model.dtype)


def test_copies_leave_the_link_to_attention() -> None:
    """They are held back from it, with buffers for two layers that the memory map has."""

    def staged(kv_ratio: float, ratio: float, rows: int = 64) -> Plan:
        return plan(rows, AFTER, offload_ratio=ratio, kv_offload_ratio=kv_ratio, transport="staged")

    for ratio in (0.005, 0.01, 0.02):
        found = staged(0.5, ratio)
        layer = sum(op.largest_remote_part for op in found.weights() if op.op.in_layer)
        assert 2 * layer <= ahead(found) <= 2 * layer + 2**17
        total = sum(op.remote_bytes for op in found.weights())
        assert found.memory(0)["staging"] == ring_bytes(0, total, ahead(found))
        assert found.waits_s == 0
    # Copies of 6% take longer than twice the products of 64 rows, but not of 512.
    assert ahead(staged(0.5, 0.06)) == 0 < ahead(staged(0.5, 0.06, rows=512))
    # Slots of 64 that attention reads from the host, where HBM has 92 times the host's rate.
    assert [ahead(staged(slots / 64, 0.02)) > 0 for slots in (0, 1, 2, 8)] == [
        False, True, True, True,
    ]  # fmt: skip


def test_copies_of_another_link_are_not_held_back() -> None:
    """Attention that reads a peer GPU leaves the host's link to copies."""
    found = plan(512, AFTER, offload_ratio=0.05, kv_offload_ratio=0.3, transport="staged")
    names = ("host", "peer:1")
    moved = {
        op.op.name: replace(op, placement=tuple((*held, 0) for held in op.placement))
        for op in found.ops
    }
    here = bytes_ahead(tuple(moved.values()), AFTER, names, "float16")
    slots = moved["attention"]
    elsewhere = tuple((local, 0, host) for local, host, _ in slots.placement)
    moved["attention"] = replace(slots, placement=elsewhere)
    assert bytes_ahead(tuple(moved.values()), AFTER, names, "float16") == 0 < here == ahead(found)
