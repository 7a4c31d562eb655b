"""Which kernel computes few rows: what the choice depends on, and for some shapes the one."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.kernels import gemm_choice
from dakrun.kernels.gemm_choice import tiles_are_faster
from dakrun.kernels.tiled_shapes import H200


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Predictions decide where SplitK_GEMM has to read X in the largest tiles."""
    tiles_are_faster.cache_clear()
    monkeypatch.setattr(gemm_choice, "FROM_ROWS", 33)
    yield
    tiles_are_faster.cache_clear()


def faster(n: int, rows: int, cols: int, *, normalized: bool = False) -> bool:
    return tiles_are_faster(n, rows // 8, cols, sms=132, limits=H200, normalized=normalized)


@given(
    n=st.integers(1, 4096),
    octets=st.integers(1, 4000),
    cols=st.integers(1, 30_000),
    sms=st.integers(28, 160),
    normalized=st.booleans(),
)
def test_it_is_splitk_for_few_rows_and_tiles_for_many(
    n: int, octets: int, cols: int, sms: int, normalized: bool
) -> None:
    found = tiles_are_faster(n, octets, cols, sms=sms, limits=H200, normalized=normalized)
    assert found == (n > 64)


@pytest.mark.usefixtures("predicted")
def test_many_columns_and_few_rows_of_w_are_for_tiles() -> None:
    """SplitK_GEMM reads all of X for every few of them."""
    assert faster(64, 4096, 16384) and faster(48, 4096, 16384, normalized=True)
    assert not faster(32, 4096, 16384) and not faster(64, 28672, 7168)


@pytest.mark.usefixtures("predicted")
def test_rows_that_have_to_be_normalized_count() -> None:
    assert faster(64, 7168, 28672)
    assert not faster(64, 21504, 7168, normalized=True)
