"""Attention to shared prefixes on the CPU: the kernels' own source in many interleavings."""

import itertools
import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
from cards import hold_to, hopper
from cascaded import check_cascade
from cases import cases
from emulated import EmulatedKernel
from hypothesis import given
from hypothesis import strategies as st

from dakrun.geometry import HEAD_DIMS
from dakrun.kernels.attention import SharedPrefix, shared_prefixes

HALF, BFLOAT = torch.float16, torch.bfloat16
Groups = Sequence[tuple[int, int, int]]
EXACT = [
    ((64, 64, 70), [(0, 3, 1)], 1, 1, 64, HALF),
    ((300, 64, 200, -1, 129, 500, 3), [(0, 2, 1), (2, 4, 2)], 2, 4, 128, HALF),
    ((130, 191, 192, 7), [(0, 3, 2)], 2, 3, 80, BFLOAT),
    ((-1, 129, 128, 700), [(1, 3, 2)], 1, 16, 64, HALF),
]
EVERY_HEAD = [
    ((130, 191, 7), [(0, 2, 2)], 2, 4, *head)
    for head in itertools.product(HEAD_DIMS, (HALF, BFLOAT))
]


@pytest.fixture
def on_the_cpu(
    emulated_kernels: Callable[..., EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches go to the emulator, for which there is no other hook."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def kernel(source: str, name: str, defines: dict[str, int]) -> EmulatedKernel:
        return emulated_kernels(source, name, {**defines, "WGMMA": 1})

    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    hold_to(hopper(3), monkeypatch)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    ("lengths", "groups", "kv_heads", "group", "dim", "dtype"),
    cases([*EXACT, *EVERY_HEAD], lambda *case: case in EXACT),
)
def test_it_is_exact(
    lengths: Sequence[int],
    groups: Groups,
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    remote: bool,
) -> None:
    """Rows with and without a prefix, idle ones among them; with RoPE."""
    allowed = 1.5e-3 if dtype == HALF else 1.2e-2
    check_cascade(lengths, groups, kv_heads, group, dim, dtype, allowed, rope=True, remote=remote)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("group", [1, 8])
def test_long_prefixes_are_split(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dakrun.kernels.attention.cascade.SPLIT_BLOCKS", 2)
    groups = [(0, 2, 9), (2, 3, 5)]
    check_cascade((600, 577, 320, 330, 325), groups, 2, group, 64, HALF, 1.5e-3)


def test_a_prefix_of_all_or_longer_ones_of_some() -> None:
    system = [1, 2, 3]
    short = {0: [*system], 1: [*system, 9], 2: [*system, 4], 3: [*system, 4]}
    assert shared_prefixes(short) == [SharedPrefix((0, 1, 2, 3), 3)]
    first, second = [1, *range(10, 30)], [1, *range(30, 50)]
    long = {0: first, 1: second, 2: first, 3: second, 4: [1]}
    assert shared_prefixes(long) == [SharedPrefix((0, 2), 21), SharedPrefix((1, 3), 21)]
    assert shared_prefixes({}) == shared_prefixes({5: [], 6: [7]}) == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_divisions_are_the_best(rows: Sequence[Sequence[int]]) -> None:
    """Against all divisions by brute force, level by level."""
    held = dict(enumerate(rows))
    found = shared_prefixes(held)
    slots = [slot for prefix in found for slot in prefix.slots]
    assert len(slots) == len(set(slots))
    for prefix in found:
        assert len({tuple(held[slot][: prefix.blocks]) for slot in prefix.slots}) == 1
        assert all(len(held[slot]) >= prefix.blocks for slot in prefix.slots)

    def best(members: Sequence[int], depth: int) -> int:
        by_block: dict[int, list[int]] = {}
        for slot in members:
            if len(held[slot]) > depth:
                by_block.setdefault(held[slot][depth], []).append(slot)
        below = sum(best(group, depth + 1) for group in by_block.values())
        return max(below, (len(members) - 1) * depth)

    assert sum(prefix.saved for prefix in found) == best(list(held), 0)
