"""Kernel variants that are compiled ahead; test_kernel_decoder.py checks that none is missing."""

import pytest
import torch
from cards import H200, PORTABLE

from dakrun.geometry import SPLITK_X_TILES
from dakrun.kernels import Variant, all_variants, variants
from dakrun.kernels.attention import splitk as attention
from dakrun.kernels.runtime import needs

HALF = torch.float16
ROWS = [8 * tiles for tiles in SPLITK_X_TILES]


def of(source: str, found: list[Variant]) -> list[dict[str, int]]:
    """Macros of the variants of `source`, sorted."""
    return sorted((macros for name, macros in found if name == source), key=str)


def float16(found: list[Variant]) -> list[Variant]:
    """Variants without those of bfloat16, and of elements of fewer bits."""
    return [v for v in found if not v[1].get("BFLOAT16") and "CODE" not in v[1]]


@pytest.mark.parametrize("mixes", [False, True])
def test_products_of_few_rows(mixes: bool) -> None:
    found = variants(HALF, ROWS, H200, head_dim=128, mixes=mixes)
    wanted = [
        macros
        for macros in of("splitk_gemm.cu", float16(all_variants("sm_90a")))
        if macros["MIXES"] <= mixes and (macros["TILES"] < 8 or not macros["NORM"])
    ]
    assert wanted and of("splitk_gemm.cu", found) == wanted
    assert len(found) == len({(source, *macros.items()) for source, macros in found})


def test_many_rows_and_attention() -> None:
    here = variants(HALF, (1,), H200, head_dim=80, group=16)
    wanted = of("tiled_gemm.cu", float16(all_variants("sm_90a")))
    assert wanted and of("tiled_gemm.cu", here) == wanted
    assert (attention.SOURCE, attention.defines(HALF, 80, 16)) in here
    elsewhere = [source for source, _ in variants(HALF, (1,), PORTABLE, head_dim=80)]
    assert "unpack.cu" in elsewhere and "tiled_gemm.cu" not in elsewhere


def test_they_are_all_known() -> None:
    found = variants(HALF, ROWS, H200, head_dim=128, mixes=True)
    assert all(variant in all_variants("sm_90a") for variant in found)


def test_a_wrapper_registers_its_own_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_registered", dict(needs._registered))

    @needs.compiled_ahead("verify.cu", seconds=100)
    def variants_of(asked: needs.Needs) -> list[needs.Macros]:
        return [{"HEAD_DIM": asked.head_dim}]

    found = variants(HALF, ROWS, H200, head_dim=96)
    assert found[0] == ("verify.cu", {"HEAD_DIM": 96}), "the longest to compile"
    assert ("verify.cu", {"HEAD_DIM": 96}) in all_variants("sm_90a")
