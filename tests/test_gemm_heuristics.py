"""Launch configurations of SplitK_GEMM: laws over shapes and tiers; operands that it refuses."""

from typing import Any

import pytest
import torch
from cards import H200, hopper
from hypothesis import given
from hypothesis import strategies as st

from dakrun.config import Workload
from dakrun.formats import KERNEL_FORMATS, PACKED16, Quantised, Split, WeightFormat
from dakrun.geometry import (
    ATOM_BYTES,
    ATOM_COLS,
    MAX_GROUP_ROW_BLOCKS,
    SPLITK_MAX_ROWS,
    SPLITK_X_TILES,
    row_block_count,
)
from dakrun.kernels.gemm import splitk_gemm
from dakrun.kernels.runtime import CtaOrder
from dakrun.launches import (
    STEP_ATOMS,
    TierAccess,
    gemm_config,
    half_columns,
    split_row_blocks,
    splitk_rows,
    tiles_for,
)
from dakrun.memory.matrix import MatrixPart, TieredMatrix
from dakrun.models import known_model, known_names
from dakrun.models.known_quantized import QUANTIZED
from dakrun.plan import decode_ops
from dakrun.units import ceil_div

KIB = 1024
SMS = 132
HOST = TierAccess(sms=8, window_bytes=256 * KIB)
Deal = tuple[list[int], list[TierAccess], int]  # row blocks per tier, how the tiers are read, SMs


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    """Row blocks per tier, how the tiers are read, and a GPU's SMs."""
    counts = st.integers(0, 20) | st.integers(0, 4000)
    row_blocks = draw(st.lists(counts, min_size=1, max_size=4).filter(any))
    windows = st.none() | st.integers(1, 1 << 22)
    access = st.builds(TierAccess, st.none() | st.integers(1, 40), windows)
    remote = draw(st.lists(access, min_size=len(row_blocks) - 1, max_size=len(row_blocks) - 1))
    return row_blocks, [TierAccess(), *remote], draw(st.integers(1, 200))


@given(
    st.integers(0, 4000),
    st.integers(1, 4000),
    st.sampled_from([Quantised("int4", 128), Quantised("e4m3", 128, 4), PACKED16]),
    st.integers(1, SPLITK_MAX_ROWS),
    st.booleans(),
)
def test_copies_over_a_link_begin_with_whole_lines(
    near: int, far: int, stored: WeightFormat, n: int, even: bool
) -> None:
    """Those of whole groups."""
    size, tiers = stored.atom_bytes, [TierAccess(), HOST]
    card, n = hopper(SMS, even_waves=even), min(n, splitk_rows(stored.atom_bytes))
    splits = split_row_blocks([near, far], tiers, card=card, atom_bytes=size)
    config = gemm_config(n, splits, tiers, card=card, atom_bytes=size)
    copy = config.rings[1].atoms * size * splits[1].group
    assert copy % 128 == 0
    assert config.rings[1].stages > 1


@given(deals(), st.booleans())
def test_every_row_block_is_assigned_once(deal: Deal, even_waves: bool) -> None:
    row_blocks, tiers, sms = deal
    splits = split_row_blocks(row_blocks, tiers, card=hopper(sms, even_waves=even_waves))
    assert [split.row_blocks for split in splits] == row_blocks
    for split in splits:
        every = range(split.row_blocks)
        groups = [every[first : first + split.group] for first in every[:: split.group]]
        assigned = [groups[cta :: split.ctas] for cta in range(split.ctas)]
        assert all(assigned), "no CTA is idle"
        taken = [row_block for own in assigned for group in own for row_block in group]
        assert sorted(taken) == list(every)
        assert 1 <= split.group <= MAX_GROUP_ROW_BLOCKS and split.step_cols % ATOM_COLS == 0
        assert even_waves or not split.row_blocks or split.group == MAX_GROUP_ROW_BLOCKS


@given(deals(), st.booleans())
def test_tiers_keep_to_their_sms(deal: Deal, even_waves: bool) -> None:
    row_blocks, tiers, sms = deal
    splits = split_row_blocks(row_blocks, tiers, card=hopper(sms, even_waves=even_waves))
    local, *remote = [split.ctas for split in splits]
    assert bool(local) == bool(row_blocks[0])
    for count, tier, row_blocks_of_tier in zip(remote, tiers[1:], row_blocks[1:], strict=True):
        assert count <= (sms if tier.sms is None else tier.sms)
        assert bool(count) == bool(row_blocks_of_tier)
    wanted = sum(
        min(row_blocks_of_tier, sms if tier.sms is None else tier.sms)
        for tier, row_blocks_of_tier in zip(tiers[1:], row_blocks[1:], strict=True)
        if row_blocks_of_tier
    )
    if wanted + bool(row_blocks[0]) <= sms:
        assert local + sum(remote) <= sms


@given(deals())
def test_even_groups_give_the_busiest_no_more(
    deal: Deal,
) -> None:
    """Counting whole groups: the choice ignores that the last group may be smaller."""
    row_blocks, tiers, sms = deal
    even, full = (
        split_row_blocks(row_blocks, tiers, card=hopper(sms, even_waves=flag))
        for flag in (True, False)
    )
    for own, other in zip(even, full, strict=True):
        busiest, without = (
            split.row_blocks
            and split.group * ceil_div(ceil_div(split.row_blocks, split.group), count)
            for split, count in ((own, own.ctas), (other, other.ctas))
        )
        assert busiest <= without


@given(deals(), st.integers(1, SPLITK_MAX_ROWS), st.booleans(), st.booleans())
def test_shares_of_k_do_not_depend_on_tiers(
    deal: Deal, n: int, even_waves: bool, units: bool
) -> None:
    """With eight of them no group is taller than what all warps can have."""
    row_blocks, tiers, sms = deal
    card, atom_bytes = hopper(sms, even_waves=even_waves), 272 if units else ATOM_BYTES
    n = min(n, splitk_rows(atom_bytes))
    resident = split_row_blocks([sum(row_blocks)], tiers[:1], card=card, atom_bytes=atom_bytes)
    few = not units or resident[0].group > 8  # of a W of 4 bits
    splits = split_row_blocks(row_blocks, tiers, card=card, atom_bytes=atom_bytes)
    for own, access in ((resident, tiers[:1]), (splits, tiers)):
        config = gemm_config(n, own, access, card=card, atom_bytes=atom_bytes)
        assert config.k_shares == (4 if few else 8)
        assert config.k_shares == 4 or all(split.group <= 8 for split in own)


@given(
    deals(), st.integers(1, SPLITK_MAX_ROWS), st.booleans(),
    st.sampled_from([ATOM_BYTES, 544, 272]),
)  # fmt: skip
def test_shared_memory_suffices(deal: Deal, n: int, even_waves: bool, atom_bytes: int) -> None:
    """For atoms of W of 16 bits, and those of smaller formats; X has 16 bits."""
    row_blocks, tiers, sms = deal
    n = min(n, splitk_rows(atom_bytes))
    splits = split_row_blocks(
        row_blocks, tiers, card=hopper(sms, even_waves=even_waves), atom_bytes=atom_bytes
    )
    config = gemm_config(n, splits, tiers, card=hopper(sms), atom_bytes=atom_bytes)
    assert config.splits == splits and len(config.rings) == len(tiers)
    assert 0 < config.shared_bytes <= H200.ring_bytes
    for split, ring in zip(splits, config.rings, strict=True):
        assert 1 <= ring.window <= ring.stages and ring.stages >= 2
        assert split.step_cols % (ring.atoms * ATOM_COLS) == 0
        w, x = atom_bytes * ring.groups * split.group, ATOM_BYTES * config.x_tiles
        stage = ring.atoms * (w + x)
        atoms_before = (ring.groups * ring.atoms - 1) * split.group
        last_w = (ring.stages - 1) * stage + atoms_before * atom_bytes
        read = ceil_div(split.group, 8) * 8 * atom_bytes  # by whole tiles
        if split.row_blocks:
            assert max(ring.stages * stage, last_w + read) <= config.shared_bytes


@given(
    st.lists(st.integers(1, 4000), min_size=2, max_size=3), st.integers(1, 200),
    st.integers(1, SPLITK_MAX_ROWS), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_mixed_tier_has_no_ctas(
    row_blocks: list[int], sms: int, n: int, last: bool, even_waves: bool
) -> None:
    mixed = len(row_blocks) - 1 if last else 1
    tiers = [TierAccess(sms=2, mixed=number == mixed) for number in range(len(row_blocks))]
    tiers[0] = TierAccess()
    splits = split_row_blocks(row_blocks, tiers, card=hopper(sms, even_waves=even_waves))
    assert [split.mixed for split in splits] == [
        number == mixed for number in range(len(row_blocks))
    ]
    local, other = splits[0], splits[mixed]
    assert (local.group, local.step_cols) == (other.group, other.step_cols)
    groups = ceil_div(row_blocks[0], local.group) + ceil_div(row_blocks[mixed], local.group)
    given = sum(min(2, count) for n, count in enumerate(row_blocks) if n not in (0, mixed))
    assert local.ctas == min(max(1, sms - given), groups), "no CTA is idle"
    config = gemm_config(n, splits, tiers, card=hopper(sms))
    assert config.mixes == (config.x_tiles < 8)
    if config.mixes:
        apart = sum(split.ctas for split in splits if not split.mixed)
        assert config.ctas == max(sms, apart)
        assert config.rings[0] == config.rings[mixed], "they share a CTA's"
    none = split_row_blocks((0, *row_blocks[1:]), tiers, card=hopper(sms, even_waves=even_waves))
    assert not any(split.mixed for split in none) and none[mixed].ctas <= 2


@given(
    st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 64), st.integers(1, SPLITK_MAX_ROWS),
    st.integers(1, 1 << 23), st.booleans(),
)  # fmt: skip
def test_windows_bound_what_is_in_flight(
    remote: int, local: int, limit: int, n: int, window: int, even_waves: bool
) -> None:
    tiers = (TierAccess(), TierAccess(sms=limit))
    splits = split_row_blocks((local, remote), tiers, card=hopper(SMS, even_waves=even_waves))
    free = gemm_config(n, splits, tiers, card=hopper(SMS)).rings[1]
    assert free.window == free.stages
    access = (tiers[0], TierAccess(limit, window))
    bound = gemm_config(n, splits, access, card=hopper(SMS)).rings[1]
    assert bound.groups == 1
    assert free.groups == 2 or (bound.stages, bound.atoms) == (free.stages, free.atoms)
    copy = bound.atoms * splits[1].group * ATOM_BYTES
    stage = copy * splits[1].ctas  # the whole stages that come closest to the window
    assert bound.window == 1 or (bound.window - 0.5) * stage <= window
    assert bound.window == bound.stages or (bound.window + 0.5) * stage >= window


@given(deals(), st.integers(1, SPLITK_MAX_ROWS))
def test_two_groups_at_once_are_of_two_waves(deal: Deal, n: int) -> None:
    row_blocks, tiers, sms = deal
    splits = split_row_blocks(row_blocks, tiers, card=hopper(sms))
    rings = gemm_config(n, splits, tiers, card=hopper(sms)).rings
    for split, tier, ring in zip(splits, tiers, rings, strict=True):
        waves = ceil_div(split.row_blocks, split.wave)
        may = n > 32 and waves and waves % 2 == 0 and split.group <= 8 and tier.window_bytes is None
        assert ring.groups == (2 if may else 1)


@given(
    st.integers(1, 4000),
    st.integers(1, 1 << 16),
    st.integers(1, SPLITK_MAX_ROWS),
    st.integers(1, 200),
)
def test_halves_of_k_are_of_whole_steps(row_blocks: int, cols: int, n: int, sms: int) -> None:
    half = half_columns(row_blocks, cols, tiles_for(n), hopper(sms))
    assert half % (STEP_ATOMS * ATOM_COLS) == 0
    assert half == 0 or (n > 32 and cols <= 2 * half < cols + 2 * STEP_ATOMS * ATOM_COLS)
    assert half < cols


@given(deals(), st.integers(1, 1 << 16))
def test_halves_do_not_depend_on_tiers(deal: Deal, cols: int) -> None:
    row_blocks, tiers, sms = deal
    splits = split_row_blocks(row_blocks, tiers, card=hopper(sms))
    config = gemm_config(64, splits, tiers, card=hopper(sms), cols=cols)
    assert config.half_cols == half_columns(sum(row_blocks), cols, config.x_tiles, hopper(sms))
    assert not config.half_cols or all(config.half_cols % s.step_cols == 0 for s in splits)


@given(st.integers(0, 300), st.integers(0, 300))
def test_ctas_of_other_memory_are_spread(local_ctas: int, others: int) -> None:
    """The kernel's arithmetic numbers each CTA once, and each half of the grid has half of them."""
    ctas = max(1, local_ctas + others)
    order = CtaOrder.of(ctas - others if local_ctas else 0, ctas)
    before = [cta * order.remote_share >> 16 for cta in range(ctas + 1)]
    numbers = [
        order.local_ctas + before[cta] if before[cta + 1] > before[cta] else cta - before[cta]
        for cta in range(ctas)
    ]
    assert sorted(numbers) == list(range(ctas))
    for half in (numbers[: ctas // 2], numbers[ctas // 2 :]):
        assert abs(sum(n >= order.local_ctas for n in half) - others * len(half) / ctas) <= 1


def test_tiles() -> None:
    for n in range(1, SPLITK_MAX_ROWS + 1):
        assert tiles_for(n) == min(tiles for tiles in SPLITK_X_TILES if 8 * tiles >= n)


@pytest.mark.parametrize("n", [-1, 0, SPLITK_MAX_ROWS + 1])
def test_rows_beyond_a_launch(n: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to {SPLITK_MAX_ROWS} rows, got {n}$"):
        tiles_for(n)
    with pytest.raises(ValueError, match=f"expected 1 to {SPLITK_MAX_ROWS} rows, got {n}$"):
        gemm_config(n, [Split(1, 1, 1, 128)], [TierAccess()], card=hopper(SMS))


@pytest.mark.parametrize("name", sorted(set(known_names()) - set(QUANTIZED)))
def test_known_models(name: str) -> None:
    model = known_model(name)
    assert model is not None
    work = Workload(batch_size=8, prompt_len=8, new_tokens=8, max_model_len=16)
    shapes = {op.shape for op in decode_ops(model, work) if op.category == "linear"}
    for rows, _ in shapes:
        count = row_block_count(rows)
        for remote in (0, 1, count // 10, count):
            tiers = (TierAccess(), HOST)
            splits = split_row_blocks((count - remote, remote), tiers, card=hopper(SMS))
            for n in range(1, SPLITK_MAX_ROWS + 1):
                config = gemm_config(n, splits, tiers, card=hopper(SMS))
                assert config.splits == splits and config.shared_bytes <= H200.ring_bytes


def changed(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The operand [..., K] with one property wrong."""
    rows, cols = tensor.shape
    return {
        "shape": torch.zeros(rows, cols + 8, dtype=tensor.dtype),
        "dtype": tensor.bfloat16(),
        "device": tensor.to("meta"),
        "stride": torch.zeros(rows, 2 * cols, dtype=tensor.dtype)[:, ::2],
        "alignment": torch.zeros(rows * cols + 1, dtype=tensor.dtype)[1:].view(rows, cols),
    }[how]


@pytest.mark.parametrize("how", ["shape", "dtype", "device", "stride", "alignment"])
@pytest.mark.parametrize("name", ["x", "out", "bias", "residual"])
def test_operands_that_do_not_fit(name: str, how: str) -> None:
    split = Split(3, 1, 2, 128)
    data = PACKED16.pack(torch.zeros(24, 40, dtype=torch.float16), split)
    weight = TieredMatrix((24, 40), torch.float16, (MatrixPart("hbm", split, PACKED16, data),))
    config = gemm_config(5, [split], [TierAccess()], card=hopper(SMS))
    operands: dict[str, Any] = {
        key: torch.zeros(shape, dtype=torch.float16)
        for key, shape in {"x": (5, 40), "out": (5, 24), "bias": (24,), "residual": (5, 24)}.items()
    }
    with pytest.raises(ValueError, match="on the current GPU, got cpu"):
        splitk_gemm(weight=weight, config=config, **operands)
    bad = changed(operands[name].view(-1, operands[name].shape[-1]), how)
    operands[name] = bad.squeeze(0) if name == "bias" else bad
    if how in ("stride", "alignment"):
        message = f"expected {name} to be contiguous and aligned to 16 bytes"
    elif (name, how) == ("x", "device"):
        message = r"expected out as \[5, 24\] of torch.float16 on meta, got .* on cpu"
    else:
        message = rf"expected {name} as .* of torch.float16 on cpu, got \[.*\] of torch.* on"
    with pytest.raises(ValueError, match=message):
        splitk_gemm(weight=weight, config=config, **operands)


@pytest.mark.parametrize("stored", KERNEL_FORMATS, ids=lambda stored: stored.name)
@pytest.mark.parametrize(("rows", "cols"), [(6144, 4096), (28672, 4096), (4096, 14336)])
def test_a_window_is_nearly_full_in_every_format(
    rows: int, cols: int, stored: WeightFormat
) -> None:
    """Rounded down, FP8 had 52% to 77% of it in flight, and 0.86 of the link's rate (H100)."""
    row_blocks, atom_bytes = (rows // 16, rows // 16), stored.atom_bytes
    tiers = [TierAccess(), HOST]
    splits = split_row_blocks(row_blocks, tiers, card=H200, atom_bytes=atom_bytes)
    config = gemm_config(8, splits, tiers, card=H200, cols=cols, atom_bytes=atom_bytes)
    ring, split = config.rings[1], splits[1]
    in_flight = atom_bytes * ring.atoms * split.group * ring.window * split.ctas
    assert 0.85 * 256 * KIB <= in_flight <= 1.15 * 256 * KIB


@pytest.mark.parametrize("limits", [{"sms": 0}, {"window_bytes": -1}])
def test_a_tier_that_nobody_may_read_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be None or at least 1"):
        TierAccess(**limits)
