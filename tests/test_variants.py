"""Kernel variants that are compiled ahead; test_kernel_decoder.py checks that none is missing."""

import pytest
import torch

from dakrun.geometry import SPLITK_X_TILES, TILED_PORTABLE_X_TILES, TILED_X_TILES
from dakrun.kernels.attention import splitk as attention
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.variants import variants

HALF = torch.float16
ROWS = [8 * tiles for tiles in SPLITK_X_TILES]


@pytest.mark.parametrize("mixes", [False, True])
def test_products_of_few_rows(mixes: bool) -> None:
    found = variants(HALF, ROWS, TILED_X_TILES, head_dim=128, mixes=mixes)
    few = [macros for source, macros in found if source == gemm.SOURCE]
    wanted = [
        macros
        for macros in gemm.all_defines(HALF)
        if macros["MIXES"] <= mixes and (macros["X_TILES"] < 8 or not macros["NORM"])
    ]
    assert sorted(few, key=str) == sorted(wanted, key=str)
    assert len(found) == len({(source, *macros.items()) for source, macros in found})


def test_many_rows_and_attention() -> None:
    here = variants(HALF, (1,), TILED_X_TILES, head_dim=80, group=16)
    many = [macros for source, macros in here if source == tiled_gemm.SOURCE]
    assert many == tiled_gemm.all_defines(HALF)
    assert (attention.SOURCE, attention.defines(HALF, 80, 16)) in here
    elsewhere = [source for source, _ in variants(HALF, (1,), TILED_PORTABLE_X_TILES, head_dim=80)]
    assert "unpack.cu" in elsewhere and tiled_gemm.SOURCE not in elsewhere
