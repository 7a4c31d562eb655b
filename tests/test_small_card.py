"""Kernels held to a card of 99 KiB without clusters: launches that dakrun chooses for that card.

On a GPU, and on the CPU in many interleavings (tests/emulated.py). tests/test_kernel_decoder.py has
a whole decoder there, tests/test_prompt_attn_emulated.py prompt attention with smaller rings.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attended import Case
from cards import SMALL, hold_to
from cascaded import check_cascade
from cases import cases, few_examples
from emulated import atoms_map, boxes_map
from hypothesis import given
from hypothesis import strategies as st
from packed_linear import all_sms, moved
from packed_matrices import quantised
from prompt_cases import PromptCase

from dakrun.formats import PACKED16, Quantised
from dakrun.geometry import HEAD_DIMS
from dakrun.hardware import Card
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import jit
from dakrun.launches import TierAccess, split_row_blocks
from dakrun.memory.matrix import MatrixPart, TieredMatrix

HALF = torch.float16
LAUNCHED: list[str] = []  # names of kernels


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    return torch.device(request.param)


@pytest.fixture(scope="module")
def card(device: torch.device) -> Card:
    """With as many SMs as the GPU, or three."""
    return replace(SMALL, sms=all_sms() if device.type == "cuda" else 3)


@pytest.fixture(autouse=True)
def on_the_device(
    device: torch.device,
    card: Card,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches are held to the card. Each emulated one takes turns in an order of its own."""
    hold_to(card, monkeypatch)
    cpu = device.type == "cpu"
    build: Callable[..., Any] = request.getfixturevalue("emulated_kernels") if cpu else jit.kernel

    def kernel(source: str, name: str, macros: dict[str, int] | None = None) -> Any:
        LAUNCHED.append(name)
        found = build(source, name, macros)
        if cpu:
            found.seed, found.together = 31 * len(LAUNCHED), 1 + len(LAUNCHED) % 3
        return found

    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
    if cpu:
        monkeypatch.setattr("dakrun.kernels.gemm.splitk.atoms_map", atoms_map)
        monkeypatch.setattr("dakrun.kernels.gemm.tiled.atoms_map", atoms_map)
        monkeypatch.setattr("dakrun.kernels.gemm.tiled.boxes_map", boxes_map)
        monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(HALF)


def product(
    x: torch.Tensor, dense: torch.Tensor, row_blocks: Sequence[int], card: Card
) -> torch.Tensor:
    """x dense^T, with `row_blocks` of W in HBM, and behind links with and without a window."""
    access = (TierAccess(), TierAccess(1, 2**15), TierAccess(1))[: len(row_blocks)]
    parts, row = [], 0
    for split, tier in zip(
        split_row_blocks(row_blocks, access, card=card), ("hbm", "host", "peer:1"), strict=False
    ):
        (data,) = PACKED16.pack(dense[row : row + 8 * split.row_blocks], split)
        if x.is_cuda:
            data = moved(data.to(x.device), tier)
        parts.append(MatrixPart(tier, split, PACKED16, (data,)))
        row += 8 * split.row_blocks
    weight = TieredMatrix((dense.shape[0], dense.shape[1]), HALF, tuple(parts))
    out = torch.full((len(x), len(dense)), math.nan, dtype=HALF, device=x.device)
    Products(x.device, card)(x, weight, access, out)
    return out.cpu()


@few_examples(6)
@given(
    n=st.sampled_from((1, 17, 64, 65, 130, 200)),
    row_blocks=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    cols=st.integers(1, 40).map(lambda chunks: 8 * chunks),
)
def test_products(
    device: torch.device, card: Card, n: int, row_blocks: list[int], cols: int
) -> None:
    """Of few rows and many; no bit depends on where W lies."""
    LAUNCHED.clear()
    rows = 8 * sum(row_blocks) - 3
    x, dense = normal(n, cols), normal(rows, cols)
    found, exact = product(x.to(device), dense, row_blocks, card), x.double() @ dense.double().T
    assert (found - exact).norm() <= 1e-3 * exact.norm()
    assert torch.equal(found, product(x.to(device), dense, [sum(row_blocks)], card))
    assert set(LAUNCHED) == {"splitk_gemm" if n <= 64 else "tiled_gemm"}


@pytest.mark.parametrize(
    ("layout", "many"),
    cases(
        [
            (Quantised("int4", 128), "tiled_gemm"),
            (Quantised("e4m3", 128, 4), "tiled_gemm"),
            (Quantised("int8", 32, 4, zeros=True), "unpack"),  # torch has more than 100 rows
        ],
        lambda layout, many: layout.code == "int4",
    ),
)
def test_products_of_fewer_bits(
    device: torch.device, card: Card, layout: Quantised, many: str
) -> None:
    if many == "unpack":
        card = replace(card, tiled_rows=100)
    access = (TierAccess(), TierAccess(1, 2**15))
    splits = split_row_blocks((20, 7), access, card=card, atom_bytes=layout.atom_bytes)
    weight = quantised(layout, 211, 456, splits, dtype=HALF, device=device.type)
    exact = weight.dense().cpu().double()
    for n, kernel in ((5, "splitk_gemm"), (16, "splitk_gemm"), (130, many)):
        LAUNCHED.clear()
        x = normal(n, 456).to(device)
        out = torch.full((n, 211), math.nan, dtype=HALF, device=x.device)
        Products(x.device, card)(x, weight, access, out)
        assert set(LAUNCHED) == {kernel}
        wanted = x.cpu().double() @ exact.T
        assert (out.cpu() - wanted).norm() <= 1e-3 * wanted.norm()


@few_examples(4)
@given(
    lengths=st.lists(st.integers(-1, 400), min_size=2, max_size=4),
    dim=st.sampled_from(HEAD_DIMS),
    group=st.sampled_from((1, 4, 16)),
    sms=st.integers(2, 5),
    alone=st.booleans(),
)
def test_decode_attention(
    device: torch.device, lengths: list[int], dim: int, group: int, sms: int, alone: bool
) -> None:
    case = Case(tuple(lengths), 2, group, dim, HALF, rope=True, device=device)
    for tiers in ((len(lengths),), (len(lengths) - 1, 1)):
        slots, config = case.slots(), case.config(tiers, sms=sms, card=SMALL)
        case.check(case.run(replace(config, alone=alone), slots), slots, 1e-3)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_prompt_attention(device: torch.device, dim: int) -> None:
    case = PromptCase([(70, 66), (0, 3), (200, 1)], 2, 4, dim, HALF, device)
    case.check(case.run(), 2e-3)


@pytest.mark.parametrize("dim", [64, 128])
def test_shared_prefixes(device: torch.device, card: Card, dim: int) -> None:
    check_cascade(
        (300, 64, 200, -1, 129, 500, 3), [(0, 2, 1), (2, 4, 2)], 2, 4, dim, HALF, 1.5e-3,
        rope=True, remote=True, device=device, card=card,
    )  # fmt: skip
