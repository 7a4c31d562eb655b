"""SplitK_FlashAttn's own source on the CPU, in many interleavings of its threads and copies."""

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
from attended import Case
from cases import cases, few_examples
from emulated import EmulatedKernel
from hypothesis import given
from hypothesis import strategies as st

from dakrun.geometry import HEAD_DIMS
from dakrun.kernels import HeadNorms
from dakrun.kernels.attention import kv_blocks
from dakrun.kernels.attention import splitk as attention
from dakrun.models.functional import rms_norm

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMS = 5
HALF, BFLOAT = torch.float16, torch.bfloat16
EXACT = [
    ((5,), 1, 1, 64, HALF),
    ((63, 64, 65, 0, -1, 200), 2, 4, 128, HALF),
    ((15, 16, 31, 47, 48, 127), 3, 1, 64, HALF),
    ((130, 700), 2, 3, 80, BFLOAT),
    ((300, -1, -1, 20), 2, 5, 96, HALF),
    ((70, 129), 1, 16, 64, HALF),
]
EVERY_HEAD = list(itertools.product((1, 4, 16), HEAD_DIMS, (HALF, BFLOAT)))
Build = Callable[..., EmulatedKernel]


@pytest.fixture(scope="module")
def build(emulated_kernels: Callable[..., EmulatedKernel]) -> Build:
    """The kernel's variant for a dtype, a head size and query heads per KV head."""

    def variant(
        dtype: torch.dtype, dim: int, group: int, *, reads_spilled: bool = False
    ) -> EmulatedKernel:
        source = attention.SOURCE
        macros = attention.defines(dtype, dim, group, reads_spilled=reads_spilled)
        return emulated_kernels(source, "splitk_flash_attn", macros)

    return variant


@pytest.fixture(autouse=True)
def on_the_cpu(
    emulated_kernels: Callable[..., EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches go to the emulator, for which there is no other hook."""
    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", emulated_kernels)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)


def interleave(kernel: EmulatedKernel, seed: int) -> None:
    """Up to four CTAs, in the turns of `seed`."""
    kernel.seed, kernel.together = seed, 1 + seed % 4


def allowed(dtype: torch.dtype) -> float:
    return 1e-3 if dtype == torch.float16 else 8e-3


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "dim", "dtype"),
    cases(
        [*EXACT, *(((70, 0, -1, 129), 2, *head) for head in EVERY_HEAD)],
        lambda *case: case in EXACT,
    ),
)
def test_it_is_exact(
    lengths: tuple[int, ...], kv_heads: int, group: int, dim: int, dtype: torch.dtype, rope: bool
) -> None:
    case = Case(lengths, kv_heads, group, dim, dtype, rope)
    slots = case.slots()
    out = case.run(case.config(sms=SMS), slots)
    case.check(out, slots, allowed(dtype))


@pytest.mark.parametrize("group", [1, 8])
def test_no_bit_depends_on_tiers_sms_or_batches(group: int, build: Build) -> None:
    case = Case((300, 64, 511, 7), 2, group, 64, rope=True)
    wanted = case.run(case.config(sms=SMS), case.slots())
    for seed, (tiers, sms) in enumerate([((4,), 1), ((4,), 40), ((2, 2), 7), ((0, 4), 3)]):
        build(case.dtype, case.dim, group).seed = 1000 * seed
        assert torch.equal(case.run(case.config(tiers, sms=sms), case.slots()), wanted), tiers
    for number, length in enumerate(case.lengths):
        alone = Case((length,), 2, group, 64, rope=True, positions=512)
        alone.q, alone.k, alone.v = (x[number : number + 1] for x in (case.q, case.k, case.v))
        alone.cached = case.cached[number : number + 1]
        assert torch.equal(alone.run(alone.config(sms=2), alone.slots())[0], wanted[number])


@pytest.mark.parametrize("group", [4, 16])
@pytest.mark.parametrize(
    ("unit", "part"), [(1, 1), (2, 1), (4, 2), (4, 4), (100, 3), (100, 1), (100, 100)]
)
def test_units_and_parts_add_up(unit: int, part: int, group: int) -> None:
    """However they are shared out: one CTA, whose warps have all, or more than there are units."""
    found = []
    for tiers, sms in (((4,), 1), ((3, 1), SMS), ((4,), 70)):
        case = Case((640, 63, 64, 330), 2, group, 64)
        config = dataclasses.replace(
            case.config(tiers, sms=sms), split_blocks=unit, chunk_blocks=part
        )
        slots = case.slots()
        found.append(case.run(config, slots))
        case.check(found[-1], slots, 1e-3)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("group", [4, 16])
@pytest.mark.parametrize("items", [3, 4, 7, 8, 11, 15, 22])
def test_rounds_of_items_change_no_bit(items: int, group: int, build: Build) -> None:
    """However many items a CTA's warps share: one CTA, and one for each item."""
    lengths = [130 + 40 * (number % 3) for number in range(items)]
    case = Case(lengths, 1, group, 128, rope=True)
    interleave(build(case.dtype, case.dim, group), items)
    slots = case.slots()
    out = case.run(case.config(sms=1), slots)
    case.check(out, slots, 1e-3)
    assert torch.equal(out, case.run(case.config(sms=items), case.slots()))


@given(
    st.lists(st.integers(-1, 400), min_size=1, max_size=70).filter(lambda n: max(n) >= 0),
    st.integers(1, 3), st.integers(0, 3), st.integers(1, 12), st.integers(0, 2**31),
)  # fmt: skip
def test_tiers_that_share_ctas_change_no_bit(
    build: Build, lengths: Sequence[int], kv_heads: int, remote: int, sms: int, seed: int
) -> None:
    """Where a CTA's heads are of all tiers."""
    case = Case(lengths, kv_heads, 2, 64)
    interleave(build(case.dtype, case.dim, 2), seed)
    there = min(remote, len(lengths) - 1)
    tiers = (len(lengths) - there, there)
    config = case.config(tiers, sms=sms, mixed=True)
    assert config.spread == (there > 0) and config.slots[0] == len(lengths)
    slots = case.slots()
    out = case.run(config, slots)
    case.check(out, slots, 1e-3)
    kept = ~out.isnan()
    assert torch.equal(out[kept], case.run(case.config(sms=sms), case.slots())[kept])


@pytest.mark.parametrize("group", [4, 16])
@pytest.mark.parametrize("unit", [1, 3])
def test_no_bit_depends_on_items_or_stages(unit: int, group: int) -> None:
    """However many units are an item, however many items a CTA has, however long its ring is."""
    found = []
    for tiers, sms, items, stages in (
        ((4,), 3, 1, 14), ((4,), 1, 3, 12), ((3, 1), SMS, 2, 7), ((4,), 2, 100, 2),
    ):  # fmt: skip
        case = Case((640, 63, 64, 330), 2, group, 64)
        plain = case.config(tiers, sms=sms)
        config = dataclasses.replace(
            plain, split_blocks=unit, chunk_blocks=unit, item_splits=items, stages=stages,
            windows=tuple(min(window, stages) for window in plain.windows),
        )  # fmt: skip
        slots = case.slots()
        found.append(case.run(config, slots))
        case.check(found[-1], slots, 1e-3)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("parts", [False, True])
def test_units_and_parts_are_alike(parts: bool) -> None:
    """Of 11 blocks, at most 10 to a unit or part, there are 6 and 5, and not 10 and 1."""
    case = Case((640, 300), 1, 4, 64)
    configs = (
        dataclasses.replace(
            case.config(sms=SMS), split_blocks=100 if parts else blocks, chunk_blocks=blocks
        )
        for blocks in (10, 6, 5)
    )
    most, some, fewer = (case.run(config, case.slots()) for config in configs)
    assert torch.equal(most[0], some[0]) and not torch.equal(some[0], fewer[0])


def test_steps_follow_each_other() -> None:
    """Each reads what the ones before have appended, over the end of a block."""
    case = Case((60, 125), 2, 2, 64, rope=True, positions=160)
    slots = case.slots()
    for _ in range(8):
        case.check(case.run(case.config(sms=SMS), slots), slots, 1e-3)
        kept = [kv_blocks.unpack(slot, case.dtype, case.room) for slot in slots]
        case.cached = [
            (keys[:, : length + 1].clone(), values[:, : length + 1].clone())
            for length, (keys, values) in zip(case.lengths, kept, strict=True)
        ]
        case.lengths = [length + 1 for length in case.lengths]


@given(
    st.lists(st.integers(-1, 400), min_size=1, max_size=70).filter(lambda n: max(n) >= 0),
    st.integers(1, 3), st.integers(1, 6), st.integers(0, 70), st.integers(1, 12),
    st.integers(0, 2**31),
)  # fmt: skip
def test_any_lengths(
    build: Build,
    lengths: Sequence[int],
    kv_heads: int,
    group: int,
    remote: int,
    sms: int,
    seed: int,
) -> None:
    case = Case(lengths, kv_heads, group, 64)
    interleave(build(case.dtype, case.dim, group), seed)
    tiers = (len(lengths) - min(remote, len(lengths)), min(remote, len(lengths)))
    slots = case.slots()
    case.check(case.run(case.config(tiers, sms=sms), slots), slots, 1e-3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda t: t.float(), r"in 16 bits, got .* torch.float32"),
        ("q", lambda t: t[:, :3], r"expected q as \[B, Hq, 64\]"),
        ("k", lambda t: t[:1], r"expected k as \[2, 2, 64\]"),
        ("v", lambda t: t.contiguous(), "equal strides"),
    ],
)
def test_operands_that_do_not_fit(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    case = Case((5, 6), 2, 2, 64)
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(ValueError, match=message):
        splitted = case.config(sms=SMS)
        case.run(splitted, case.slots())


@few_examples(20)
@given(
    st.lists(
        st.tuples(st.integers(-1, 900), st.integers(0, 15)), min_size=1, max_size=12
    ).filter(lambda rows: max(rows)[0] >= 0),
    st.integers(1, 3), st.integers(0, 3), st.integers(2, 12), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_slots_that_span_tiers_change_no_bit(
    build: Build,
    rows: Sequence[tuple[int, int]],
    kv_heads: int,
    remote: int,
    sms: int,
    short_splits: bool,
    seed: int,
) -> None:
    """Whichever of their leading blocks lie in the remote tier, some of which no row has yet."""
    lengths, spilled = zip(*rows, strict=True)
    case = Case(lengths, kv_heads, 2, 64)
    interleave(build(case.dtype, case.dim, 2, reads_spilled=True), seed)
    there = min(remote, len(lengths) - 1)
    config = case.config((len(lengths) - there, there), sms=sms, reads_spilled=True)
    one = case.config(sms=sms)
    assert config.reads_spilled and config.ctas[1] > 0
    if short_splits:
        config, one = (
            dataclasses.replace(c, split_blocks=2, chunk_blocks=1, item_splits=1)
            for c in (config, one)
        )
    slots = case.slots()
    out = case.run(config, slots, spilled=spilled)
    case.check(out, slots, 1e-3)
    kept = ~out.isnan()
    assert torch.equal(out[kept], case.run(one, case.slots())[kept])


def test_tiers_that_share_ctas_span_without_further_ado() -> None:
    case = Case((300, 700), 2, 2, 64)
    config = case.config((2, 0), sms=SMS, mixed=True, reads_spilled=True)
    assert not config.reads_spilled and config.ctas == (SMS,)
    with pytest.raises(ValueError, match="reads_spilled"):
        case.run(config, case.slots(), spilled=(1, 0))


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    cases(
        [*EVERY_HEAD, (3, 80, HALF)],
        lambda *head: head in ((1, 64, HALF), (4, 128, BFLOAT), (3, 80, HALF), (16, 64, HALF)),
    ),
)
def test_heads_are_normalized_as_they_are_loaded(group: int, dim: int, dtype: torch.dtype) -> None:
    """Before RoPE; the key that is appended is the normalized one."""
    case = Case((5, 70, -1, 130), 2, group, dim, dtype, rope=True)
    weights = (torch.rand(2, dim, generator=torch.manual_seed(dim)) + 0.5).to(dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-6)
    slots = case.slots()
    out = case.run(case.config(sms=SMS), slots, head_norms=norms)
    case.q, case.k = rms_norm(case.q, weights[0], 1e-6), rms_norm(case.k, weights[1], 1e-6)
    case.check(out, slots, 2 * allowed(dtype))
