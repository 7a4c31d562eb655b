"""Laws of the CTA model: SMs for each tier of an op and their times, with the H200s' profiles."""

from hypothesis import given
from hypothesis import strategies as st

from dakrun.config import Workload
from dakrun.hardware import HardwareProfile, load_profile
from dakrun.launches import TierAccess, split_row_blocks
from dakrun.models import known_model
from dakrun.models.hub import in_format
from dakrun.plan import decode_ops, linear_op, predicted_time, sms_by_tier
from dakrun.plan.cta_model import _group, read_times

HOST, PEER = load_profile("h200-pcie5"), load_profile("h200-nvlink-peer")


def test_the_busiest_cta_counts_for_as_much_as_all_bytes() -> None:
    op = linear_op("product", (7168, 7168), n=8, element_bytes=2)

    def local(row_blocks: int, sms: int) -> float:
        counts = (row_blocks, op.units - row_blocks)
        kernel, _ = read_times(op, counts, (sms, HOST.sms - sms), HOST, ("host",))
        return kernel * HOST.hbm_bytes_per_s / (row_blocks * op.read_bytes / op.units)

    assert local(7 * 124, 124) < local(7 * 123, 124), "seven for each, but for one"
    seven, eight = local(7 * 120, 120), local(7 * 120 + 8, 120)
    assert 1.04 < eight / seven < 1.1, "eight for some, seven for most"


@given(st.integers(1, 511), st.integers(1, 16), st.booleans(), st.sampled_from(["awq", "fp8", ""]))
def test_groups_are_those_of_launches(far: int, sms: int, mixed: bool, name: str) -> None:
    """Behind a link, of 8 and 4 bits, they have not any size."""
    model = known_model("llama-3-8b")
    assert model
    work = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=128)
    ops = decode_ops(in_format(model, name) if name else model, work)
    (op,) = (op for op in ops if op.name == "o")
    assert op.units == 512 and HOST.card
    counts, tiers = (512 - far, far), (TierAccess(), TierAccess(sms, mixed=mixed))
    splits = split_row_blocks(counts, tiers, card=HOST.card, atom_bytes=op.atom_bytes)
    if mixed:
        groups = [_group(op, HOST.card, 512 - far, min(HOST.sms, 512), far, far=True)] * 2
    else:
        own = min(sms, far)
        local = min(HOST.sms - own, 512 - far)
        groups = [
            _group(op, HOST.card, 512 - far, local, far=False),
            _group(op, HOST.card, far, own, far=True),
        ]
    assert [split.group for split in splits] == groups


@given(st.integers(1, 200), st.integers(1, 16))
def test_a_link_never_brings_more_than_its_rate(row_blocks: int, sms: int) -> None:
    op = linear_op("product", (7168, 7168), n=8, element_bytes=2)
    for profile, tier in ((HOST, "host"), (PEER, "peer:1")):
        counts, split = (op.units - row_blocks, row_blocks), (profile.sms - sms, sms)
        _, link = read_times(op, counts, split, profile, (tier,))
        needed = row_blocks * op.read_bytes / op.units / profile.tier(tier).direct_bytes_per_s
        assert link >= needed * (1 - 1e-9)


def test_rings_that_bridge_the_time_between_launches_keep_a_link_busy() -> None:
    """Those of eight SMs hold 2 us of NVLink, and 15 of PCIe."""
    op = linear_op("product", (12288, 4096), n=8, element_bytes=2)
    row_block = op.read_bytes / op.units

    def waited(row_blocks: int, sms: int) -> float:
        counts, split = (op.units - row_blocks, row_blocks), (PEER.sms - sms, sms)
        _, link = read_times(op, counts, split, PEER, ("peer:1",))
        return link - row_blocks * row_block / PEER.tier("peer:1").direct_bytes_per_s

    assert waited(96, 16) < waited(96, 12) < waited(96, 8), "more SMs hold more"
    host = HOST.tier("host")
    for row_blocks in (8, 16, 32):  # whole groups for each of them
        counts, split = (op.units - row_blocks, row_blocks), (HOST.sms - host.sms, host.sms)
        _, link = read_times(op, counts, split, HOST, ("host",))
        assert link * host.direct_bytes_per_s <= row_blocks * row_block * (1 + 1e-9)


@given(st.integers(0, 896), st.integers(1, 32))
def test_a_part_is_mixed_where_that_ends_sooner(row_blocks: int, rows: int) -> None:
    op = linear_op("product", (7168, 7168), n=rows, element_bytes=2)
    counts = (op.units - row_blocks, row_blocks)
    for profile, tier in ((HOST, "host"), (PEER, "peer:1")):

        def seconds(
            sms: tuple[int, ...], profile: HardwareProfile = profile, tier: str = tier
        ) -> float:
            kernel, link = read_times(op, counts, sms, profile, (tier,))
            return predicted_time(op, kernel, profile, link=link)

        sms = sms_by_tier(op, [counts], 0.0, 0.0, profile, (tier,))
        assert sum(sms) == profile.sms or row_blocks == op.units
        if profile is HOST or not 0 < row_blocks < op.units:
            assert (sms[1] > 0) == (row_blocks > 0), "a window is its own SMs'"
        elif sms[1] == 0:
            assert all(seconds(sms) < seconds((profile.sms - n, n)) for n in (8, 12, 16))
            assert row_blocks < 0.09 * op.units, "else the link is waited for"


def test_attention_gets_no_more_sms_for_a_peer_than_keep_its_link_busy() -> None:
    workload = Workload(batch_size=64, prompt_len=32, new_tokens=32, max_model_len=2048)
    ops = decode_ops(known_model("llama-3-8b"), workload)
    op = next(op for op in ops if op.category == "attention")

    def split(local: int, remote: int) -> tuple[int, ...]:
        return sms_by_tier(op, [(local, remote)], 0.0, 0.0, PEER, ("peer:1",))

    peer = PEER.tier("peer:1")
    local, few = split(48, 16)
    assert local + few == PEER.sms
    assert few < peer.sms and few * PEER.card.ring_bytes > 2e-6 * peer.direct_bytes_per_s
    assert split(64, 0) == split(60, 4) == (PEER.sms, 0), "mixed, where HBM takes longer"
    assert split(0, 64) == (0, peer.sms), "no others could have the rest"
    host = sms_by_tier(op, [(60, 4)], 0.0, 0.0, HOST, ("host",))
    assert host == (HOST.sms - HOST.tier("host").sms, HOST.tier("host").sms)
