"""Cards: from a profile or a compute capability, or held by hand; launches claim no more."""

import ctypes
import mmap
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cards import H200, PORTABLE, SMALL, hold_to, hopper
from cases import few_examples
from hypothesis import given
from hypothesis import strategies as st

from dakrun.geometry import (
    HEAD_DIMS,
    SPLITK_MAX_ROWS,
    TILED_MAX_ROWS,
    TILED_PORTABLE_X_TILES,
)
from dakrun.hardware import Card, load_profile, parse_profile, profile_text
from dakrun.kernels.attention import KVShape, attention_config, prompt
from dakrun.kernels.runtime import Kernel, card_of, compile_ahead, held_to
from dakrun.launches import (
    TierAccess,
    gemm_config,
    kernel_for,
    split_row_blocks,
    tiled_config,
    tiled_rows,
)

KIB = 1024


def test_a_hopper_and_a_small_card() -> None:
    assert (H200.shared_bytes, H200.ring_bytes) == (227 * KIB, 112 * KIB)
    assert (SMALL.shared_bytes, SMALL.ring_bytes) == (99 * KIB, 98 * KIB)
    assert H200.has_wgmma and not SMALL.has_wgmma
    assert [H200.max_clusters(ctas) for ctas in (1, 2, 8, 9)] == [132, 66, 15, 0]
    assert [SMALL.max_clusters(ctas) for ctas in (1, 2)] == [188, 0]
    assert Card.of("9.0", sms=66).clusters == (33, 19, 15, 11, 8, 7, 7), "in proportion"
    assert [H200.ringless_bytes(1, ctas) for ctas in (131, 132, 264)] == [0, H200.ring_bytes, 0]
    assert H200.ringless_bytes(64, 132) == 0, "many rows"
    assert SMALL.ringless_bytes(1, SMALL.sms) == 0, "CTAs do not share an SM"


def test_a_profile_s_card() -> None:
    h200 = load_profile("h200-pcie5")
    assert h200.card == H200 == replace(h200, facts={}).card, "what is not said is a Hopper's"
    assert load_profile("rtx-pro-6000").card == SMALL
    counted = replace(h200, clusters=(64, 38))
    assert parse_profile(profile_text(counted), source="x").card == hopper(132, clusters=(64, 38))


def test_a_card_is_held_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    hold_to(H200, monkeypatch)
    with held_to(SMALL):
        assert card_of(gpu) is SMALL
    with pytest.raises(RuntimeError), held_to(SMALL):
        raise RuntimeError
    assert card_of(gpu) is H200


@pytest.mark.parametrize(("shared_bytes", "cluster"), [(98 * KIB, 2), (98 * KIB + 1, 1)])
def test_a_launch_that_claims_more_than_the_held_card_has(shared_bytes: int, cluster: int) -> None:
    class Args(ctypes.Structure):
        _fields_ = ()

    function = SimpleNamespace(kernel=SimpleNamespace(ptr=0), name="copy", shared_size_bytes=KIB)
    with held_to(SMALL), pytest.raises(RuntimeError, match=r"launch of copy failed: .* 12\.0 with"):
        Kernel(function).launch(2, 32, Args(), shared_bytes=shared_bytes, cluster=cluster)


class Driver(SimpleNamespace):
    """A driver that reads `size` bytes of arguments, as many as the struct has in C++."""

    def __init__(self, size: int) -> None:
        names = ("CUlaunchConfig", "CUstream", "CUfunction")
        super().__init__(**dict.fromkeys(names, lambda *_: SimpleNamespace()))
        self.size, self.read = size, b""
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def cuLaunchKernelEx(self, config: object, function: object, pointers: int, _: int) -> Any:
        (address,) = (ctypes.c_void_p * 1).from_address(pointers)
        self.read = ctypes.string_at(address, self.size)
        return (self.CUresult.CUDA_SUCCESS,)


def test_the_driver_reads_no_memory_behind_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A struct with a tensor map has a multiple of 64 bytes; the memory behind it is not mapped."""

    class Args(ctypes.Structure):
        _fields_ = (("map", ctypes.c_uint64 * 16), ("n", ctypes.c_int))

    function = SimpleNamespace(kernel=SimpleNamespace(ptr=0), max_dynamic_shared_size_bytes=0)
    driver = Driver(192)
    monkeypatch.setattr("dakrun.kernels.runtime.jit._driver", lambda: driver)
    monkeypatch.setattr("dakrun.kernels.runtime.jit._current_stream", lambda: 0)
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(first + mmap.PAGESIZE)
    assert libc.mprotect(behind, mmap.PAGESIZE, 0) == 0  # PROT_NONE
    try:
        args = Args.from_address(first + mmap.PAGESIZE - ctypes.sizeof(Args))
        args.n = 5
        Kernel(function).launch(1, 32, args)
    finally:
        libc.mprotect(behind, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    assert driver.read == bytes(args) + bytes(192 - ctypes.sizeof(Args))


def test_a_held_card_keeps_kernels_from_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled ahead or when they are launched, for the GPU at hand."""
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(
        "dakrun.kernels.runtime.jit.cached_cubin", lambda _, arch, defines: asked.append(defines)
    )
    for card in (SMALL, PORTABLE, H200):
        with held_to(card):
            compile_ahead([("tiled_gemm.cu", {"TILES": 8})], "sm_90a")
    compile_ahead([("tiled_gemm.cu", {"TILES": 8})], "sm_90a")
    no_wgmma = {"TILES": 8, "WGMMA": 0}
    assert asked == [{**no_wgmma, "CLUSTERS": 0}, no_wgmma, {"TILES": 8}, {"TILES": 8}]


@pytest.mark.parametrize("card", [H200, SMALL])
@given(
    counts=st.lists(st.integers(0, 4000), min_size=1, max_size=3).filter(any),
    n=st.integers(1, SPLITK_MAX_ROWS),
    dim=st.sampled_from(HEAD_DIMS),
    alone=st.booleans(),
)
def test_launches_fit_the_card(
    card: Card, counts: list[int], n: int, dim: int, alone: bool
) -> None:
    """As many CTAs as share an SM fit its memory, 1 KiB for the driver and for barriers each."""
    tiers = [TierAccess(), TierAccess(8, 2**18), TierAccess(4)][: len(counts)]
    products = gemm_config(n, split_row_blocks(counts, tiers, card=card), tiers, card=card)
    attention = attention_config(KVShape(8, dim, 1000), counts, tiers, card=card, alone=alone)
    for config in (products, attention):
        shared = config.shared_bytes + 2 * KIB
        ctas = 1 if config is attention and alone else card.ctas_per_sm
        assert ctas * shared <= card.shared_bytes_per_sm
    stages = [*(ring.stages for ring in products.rings), attention.stages]
    assert min(stages) >= 2
    if alone:
        assert 2 * attention.shared_bytes > card.shared_bytes_per_sm - 4 * KIB


@pytest.mark.parametrize("card", [H200, SMALL, replace(SMALL, sms=48)])
@given(
    counts=st.lists(st.integers(0, 4000), min_size=1, max_size=3).filter(any),
    n=st.integers(1, TILED_MAX_ROWS),
    cols=st.integers(1, 16384),
    limited=st.booleans(),
    atom_bytes=st.sampled_from((1024, 272, 288, 528, 544, 704)),
)
@few_examples(20)
def test_launches_of_many_rows_fit_the_card(
    card: Card, counts: list[int], n: int, cols: int, limited: bool, atom_bytes: int
) -> None:
    """One or two CTAs on an SM, in clusters that the card has; rings have two stages or more.

    Where the rings of a format do not fit, torch multiplies.
    """
    if not tiled_rows(card, atom_bytes):
        assert card != H200 and atom_bytes == 704
        kernel = partial(kernel_for, row_blocks=512, cols=cols, card=card, atom_bytes=atom_bytes)
        assert {kernel(many, remote=True) for many in (17, n + 32)} == {"torch"}
        return
    access = [TierAccess(), TierAccess(8, 2**18), TierAccess(4, 2**20)]
    tiers = (access if limited else [TierAccess()] * 3)[: len(counts)]
    for launch in tiled_config(
        n, counts, tiers, cols=cols, card=card, atom_bytes=atom_bytes
    ).launches:
        sharing = launch.shape.ctas_per_sm
        room = card.shared_by(sharing).lone_ring_bytes
        assert launch.shared_bytes <= room and launch.stages >= 2
        assert launch.shape.ctas <= card.max_cluster and launch.ctas <= sharing * card.sms
        assert launch.shape.tiles in TILED_PORTABLE_X_TILES or card.has_wgmma
    for dim in HEAD_DIMS:
        stages = prompt.ring_stages(dim, card)
        assert stages >= 2 and stages * prompt.stage_bytes(dim) <= card.lone_ring_bytes


def test_idle_ctas_where_two_share_an_sm() -> None:
    """A free SM would get two CTAs of the next launch; where an SM has room for one, it cannot."""
    tiers = [TierAccess()]
    for card, ctas in ((H200, 132), (SMALL, 3)):
        assert (
            gemm_config(8, split_row_blocks([3], tiers, card=card), tiers, card=card).ctas == ctas
        )
        attention = attention_config(KVShape(1, 128, 64), [1], tiers, card=card)
        assert sum(attention.ctas) + attention.idle >= ctas


@pytest.mark.parametrize(
    ("card", "kernels"),
    [
        (H200, {32: "splitk", 33: "tiled", 4096: "tiled"}),
        (PORTABLE, {64: "splitk", 128: "splitk", 129: "torch"}),
        (SMALL, {64: "splitk", 65: "tiled", 4096: "tiled"}),
        (replace(SMALL, tiled_rows=512), {64: "splitk", 512: "tiled", 513: "torch"}),
    ],
)
def test_the_kernel_for_some_rows(card: Card, kernels: dict[int, str]) -> None:
    for n, kernel in kernels.items():
        assert kernel_for(n, 3584, 4096, remote=False, card=card) == kernel
