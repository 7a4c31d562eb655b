"""All kernels with rings on a card of 99 KiB without clusters, in many interleavings, on the CPU.

Launches are those that dakrun chooses for the card. tests/test_kernel_decoder.py runs a whole
decoder there, tests/test_prompt_attn_emulated.py prompt attention with smaller rings.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from attended import Case
from cards import SMALL, hold_to
from cascaded import check_cascade
from cases import few_examples
from emulated import EmulatedKernel, atoms_map, boxes_map
from hypothesis import given
from hypothesis import strategies as st

from dakrun.formats import PACKED16
from dakrun.geometry import HEAD_DIMS
from dakrun.kernels.gemm.dispatch import Products
from dakrun.launches import TierAccess, split_row_blocks
from dakrun.memory.matrix import MatrixPart, TieredMatrix

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HALF = torch.float16
CPU = torch.device("cpu")
CARD = replace(SMALL, sms=3)


LAUNCHED: list[str] = []  # names of kernels


@pytest.fixture(autouse=True)
def on_the_cpu(
    emulated_kernels: Callable[..., EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches go to the emulator, and take turns in an order of their own each."""

    def kernel(source: str, name: str, macros: dict[str, int] | None = None) -> EmulatedKernel:
        LAUNCHED.append(name)
        found = emulated_kernels(source, name, macros)
        found.seed, found.together = 31 * len(LAUNCHED), 1 + len(LAUNCHED) % 3
        return found

    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
    monkeypatch.setattr("dakrun.kernels.gemm.splitk.atoms_map", atoms_map)
    monkeypatch.setattr("dakrun.kernels.gemm.tiled.atoms_map", atoms_map)
    monkeypatch.setattr("dakrun.kernels.gemm.tiled.boxes_map", boxes_map)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    hold_to(CARD, monkeypatch)


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(HALF)


def product(x: torch.Tensor, dense: torch.Tensor, row_blocks: Sequence[int]) -> torch.Tensor:
    """x dense^T, with `row_blocks` of W in HBM, and behind links with and without a window."""
    access = (TierAccess(), TierAccess(1, 2**15), TierAccess(1))[: len(row_blocks)]
    parts, row = [], 0
    for tier, split in enumerate(split_row_blocks(row_blocks, access, card=CARD)):
        data = PACKED16.pack(dense[row : row + 8 * split.row_blocks], split)
        parts.append(MatrixPart(("hbm", "host", "peer:1")[tier], split, PACKED16, data))
        row += 8 * split.row_blocks
    weight = TieredMatrix((dense.shape[0], dense.shape[1]), HALF, tuple(parts))
    out = torch.full((len(x), len(dense)), math.nan, dtype=HALF)
    Products(CPU, CARD)(x, weight, access, out)
    return out


@few_examples(6)
@given(
    n=st.sampled_from((1, 17, 64, 65, 130, 200)),
    row_blocks=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    cols=st.integers(1, 40).map(lambda chunks: 8 * chunks),
)
def test_products(n: int, row_blocks: list[int], cols: int) -> None:
    """Of few rows and many; no bit depends on where W lies."""
    LAUNCHED.clear()
    rows = 8 * sum(row_blocks) - 3
    x, dense = normal(n, cols), normal(rows, cols)
    found, exact = product(x, dense, row_blocks), x.double() @ dense.double().T
    assert (found - exact).norm() <= 1e-3 * exact.norm()
    assert torch.equal(found, product(x, dense, [sum(row_blocks)]))
    assert set(LAUNCHED) == {"splitk_gemm" if n <= 64 else "tiled_gemm"}


@few_examples(4)
@given(
    lengths=st.lists(st.integers(-1, 400), min_size=2, max_size=4),
    dim=st.sampled_from(HEAD_DIMS),
    group=st.sampled_from((1, 4, 16)),
    sms=st.integers(2, 5),
    alone=st.booleans(),
)
def test_decode_attention(lengths: list[int], dim: int, group: int, sms: int, alone: bool) -> None:
    case = Case(tuple(lengths), 2, group, dim, HALF, rope=True)
    for tiers in ((len(lengths),), (len(lengths) - 1, 1)):
        slots, config = case.slots(), case.config(tiers, sms=sms, card=CARD)
        case.check(case.run(replace(config, alone=alone), slots), slots, 1e-3)


@pytest.mark.parametrize("dim", [64, 128])
def test_shared_prefixes(dim: int) -> None:
    lengths = (300, 64, 200, -1, 129, 500, 3)
    check_cascade(
        lengths, [(0, 2, 1), (2, 4, 2)], 2, 4, dim, HALF, 1.5e-3, rope=True, remote=True, card=CARD
    )
