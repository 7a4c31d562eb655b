"""The packed form of slots: back and forth, byte by byte, and what does not fit."""

from dataclasses import replace

import pytest
import torch
from cards import H200, hopper
from hypothesis import given
from hypothesis import strategies as st

from dakrun.geometry import HEAD_DIMS, KV_BLOCK
from dakrun.kernels.attention import KVShape, attention_config, kv_blocks, split_sizes, stage_bytes
from dakrun.launches import TierAccess


@given(st.integers(1, 5), st.sampled_from(HEAD_DIMS), st.integers(1, 200), st.integers(0, 200))
def test_a_slot_is_read_back(heads: int, dim: int, positions: int, filled: int) -> None:
    shape, filled = KVShape(heads, dim, positions), min(filled, positions)
    keys, values = torch.randn(2, heads, filled, dim).to(torch.bfloat16)
    slot = kv_blocks.pack(keys, values, shape)
    assert slot.numel() == shape.slot_bytes == 2 * heads * shape.blocks * stage_bytes(shape)
    for part, found in zip(
        (keys, values), kv_blocks.unpack(slot, torch.bfloat16, shape), strict=True
    ):
        assert found.shape == (heads, positions, dim)
        assert torch.equal(found[:, :filled], part) and not found[:, filled:].any()


def test_where_an_element_lies() -> None:
    shape = KVShape(kv_heads=3, head_dim=80, positions=130)
    keys, values = torch.randn(2, 3, 130, 80).half()
    elements = kv_blocks.pack(keys, values, shape).view(torch.float16)
    for head, position, dim in ((0, 0, 0), (2, 129, 79), (1, 64, 9), (1, 63, 72)):
        block = (head * shape.blocks + position // KV_BLOCK) * 2 * 80 * KV_BLOCK
        place = dim // 8 ^ position % 8 // 4  # 10 chunks: neighbours change places
        within = position % KV_BLOCK * 80 + place * 8 + dim % 8
        assert elements[block + within] == keys[head, position, dim]
        assert elements[block + 80 * KV_BLOCK + within] == values[head, position, dim]


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_appending_is_packing_one_more(dim: int) -> None:
    shape = KVShape(kv_heads=3, head_dim=dim, positions=130)
    keys, values = torch.randn(2, 3, 130, dim).to(torch.bfloat16)
    slot = torch.zeros(shape.slot_bytes, dtype=torch.uint8)
    for position in range(130):
        kv_blocks.append(slot, keys[:, position], values[:, position], position, shape)
        if position in (0, 63, 64, 129):
            count = position + 1
            assert torch.equal(slot, kv_blocks.pack(keys[:, :count], values[:, :count], shape))


@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.sampled_from(HEAD_DIMS))
def test_writing_piece_by_piece_is_packing_all(pieces: list[int], dim: int) -> None:
    total = sum(pieces)
    shape = KVShape(kv_heads=2, head_dim=dim, positions=total)
    keys, values = torch.randn(2, 2, total, dim).half()
    slot, start = torch.zeros(shape.slot_bytes, dtype=torch.uint8), 0
    for count in pieces:
        part = slice(start, start + count)
        kv_blocks.write(slot, keys[:, part], values[:, part], start, shape)
        start += count
        for given_, found in zip(
            (keys, values), kv_blocks.read(slot, start, torch.float16, shape), strict=True
        ):
            assert torch.equal(found, given_[:, :start])
    assert torch.equal(slot, kv_blocks.pack(keys, values, shape))


def test_what_does_not_fit() -> None:
    shape, keys = KVShape(2, 64, 64), torch.zeros(2, 64, 64).half()
    for bad in ((keys.float(), keys), (keys, keys[:, :3]), (keys.bfloat16(), keys)):
        with pytest.raises(ValueError, match="of one shape in 16 bits"):
            kv_blocks.pack(*bad, shape)
    for bad in (keys[:1], torch.zeros(2, 65, 64).half()):
        with pytest.raises(ValueError, match="expected keys that fit"):
            kv_blocks.pack(bad, bad, shape)
    with pytest.raises(ValueError, match="expected 32768 bytes"):
        kv_blocks.unpack(torch.zeros(5, dtype=torch.uint8), torch.float16, shape)
    with pytest.raises(ValueError, match="expected positions of"):
        kv_blocks.write(torch.zeros(shape.slot_bytes, dtype=torch.uint8), keys, keys, 1, shape)
    with pytest.raises(ValueError, match="head_dim"):
        KVShape(1, 72, 64)


def test_a_window_has_room_for_short_blocks() -> None:
    """Of the ends of heads, which CTAs read at the same time."""
    host = TierAccess(sms=8, window_bytes=256 << 10)
    shape = KVShape(8, 128, 2048)  # stages of 16 KiB: two for each SM, if all were whole
    config = attention_config(shape, (96, 32), (TierAccess(), host), card=H200)
    assert config.ctas[1] * config.windows[1] * stage_bytes(shape) == 512 << 10
    peer = TierAccess(sms=40, window_bytes=4 << 20)
    config = attention_config(shape, (96, 32), (TierAccess(), peer), card=H200)
    assert config.windows[1] == config.stages, "what fills the ring as it is"


@given(
    st.sampled_from(HEAD_DIMS), st.integers(1, 64), st.integers(1, 200_000),
    st.integers(0, 300), st.integers(0, 300), st.integers(1, 1 << 22), st.integers(1, 200),
)  # fmt: skip
def test_how_it_is_launched(
    dim: int, heads: int, positions: int, local: int, remote: int, window: int, sms: int
) -> None:
    shape = KVShape(heads, dim, positions)
    tiers = (TierAccess(), TierAccess(sms=8, window_bytes=window))
    config = attention_config(shape, (local, remote), tiers, card=hopper(sms), capacity=9)
    assert config.stages >= 2 and config.shared_bytes <= H200.ring_bytes
    assert bool(config.ctas[0]) == bool(local) and bool(config.ctas[1]) == bool(remote)
    assert config.ctas[1] <= min(8, sms * 8, remote * heads)
    assert config.idle == max(0, sms - sum(config.ctas)), "one for each SM"
    in_flight = config.ctas[1] * config.windows[1] * stage_bytes(shape)
    assert config.windows[1] == 1 or in_flight <= 2 * window, "twice of what whole stages need"
    assert max(config.windows) <= config.stages
    assert config.max_splits <= 128 and config.max_chunks <= 7
    alone = attention_config(shape, (1,), tiers[:1], card=H200, capacity=9)
    assert (alone.split_blocks, alone.chunk_blocks) == (config.split_blocks, config.chunk_blocks), (
        "units and parts depend on what there is room for"
    )
    lone = attention_config(shape, (local, remote), tiers, card=hopper(sms), capacity=9, alone=True)
    assert lone == replace(config, alone=True)
    assert H200.ring_bytes < lone.shared_bytes < H200.shared_bytes


@pytest.mark.parametrize(
    ("slots", "positions", "stages"),
    [
        (64, 2048, 6), (33, 2048, 6), (32, 2048, 7), (64, 1984, 7), (1, 4096, 6), (64, 4096, 6),
        (512, 1040, 7),
    ],
)  # fmt: skip
def test_long_heads_have_shorter_rings(slots: int, positions: int, stages: int) -> None:
    """Of 64 blocks, or of 32 where there are two heads for each SM, by the slots of the launch."""
    shape = KVShape(8, 128, positions)
    config = attention_config(shape, [slots], [TierAccess()], card=H200, capacity=512)
    assert config.stages == config.windows[0] == stages


@pytest.mark.parametrize(
    ("slots", "window", "ctas"),
    [
        ((127, 1), 2**18, (128, 4)), ((63, 1), 2**18, (124, 8)), ((63, 1), 2**20, (124, 8)),
        ((62, 2), 2**18, (124, 8)),
        ((0, 4), 2**18, (0, 8)),
    ],
)  # fmt: skip
def test_a_remote_tier_leaves_ctas_that_the_local_one_has_use_for(
    slots: tuple[int, int], window: int, ctas: tuple[int, int]
) -> None:
    """1,016 heads are nine for one of 124 CTAs, and eight for each of 128.

    With one slot of 64 the link takes longer than HBM, and needs all that may be in flight.
    """
    tiers = (TierAccess(), TierAccess(8, window))
    config = attention_config(KVShape(8, 128, 2048), slots, tiers, card=H200)
    assert config.ctas == ctas
    ring = config.stages * stage_bytes(config.shape)
    four = 4 * stage_bytes(config.shape)  # the largest window of a CTA, but for a whole ring
    in_flight = config.windows[1] * stage_bytes(config.shape)
    assert in_flight == (ring if window > 8 * ring else four)
    uneven = replace(H200, even_waves=False)
    kept = attention_config(KVShape(8, 128, 2048), slots, tiers, card=uneven)
    assert kept.ctas == (132 - 8 if slots[0] else 0, 8), "all SMs of the tier"


@pytest.mark.parametrize(
    ("slots", "mixed", "merged"),
    [
        ((60, 4), (1,), (64,)), ((60, 2, 2), (1, 2), (64,)), ((60, 2, 2), (1,), (62, 2)),
        ((60, 2, 2), (2,), (60, 2, 2)), ((60, 0, 4), (2,), (64,)), ((0, 4), (1,), (4,)),
    ],
)  # fmt: skip
def test_mixed_tiers_share_the_local_ctas(
    slots: tuple[int, ...], mixed: tuple[int, ...], merged: tuple[int, ...]
) -> None:
    tiers = [TierAccess(8, 2**21, mixed=number in mixed) for number in range(len(slots))]
    tiers[0], shape = TierAccess(), KVShape(8, 128, 2048)
    config = attention_config(shape, slots, tiers, card=H200)
    assert config.slots == merged and sum(config.ctas) == 132
    assert config.spread == (slots[0] > 0 and merged[0] > slots[0])
    alone = attention_config(shape, merged[:1], tiers[:1], card=hopper(config.ctas[0]))
    assert (config.ctas[0], config.windows[0]) == (alone.ctas[0], alone.windows[0])


@pytest.mark.parametrize(
    ("blocks", "heads", "unit", "part"),
    [
        (32, 512, 32, 32), (17, 448, 32, 32), (33, 256, 32, 32), (17, 255, 8, 8),
        (2048, 8, 128, 32), (32, 8, 4, 4), (32, 64, 16, 4),
        (32, 128, 32, 8), (1, 9, 4, 4), (128, 100, 16, 16), (20_000, 1, 157, 157),
        (65_536, 128, 32_768, 512),
    ],
)  # fmt: skip
def test_units_and_parts_leave_items_for_all(blocks: int, heads: int, unit: int, part: int) -> None:
    *found, items = split_sizes(blocks, heads)
    assert found == [unit, part]
    assert items == 1 or unit == part, "an item is some units or a part"
