"""The kernel for a number of rows of X: pure functions of shapes and the card."""

from typing import Literal

from dakrun.geometry import (
    ATOM_BYTES,
    ATOM_COLS,
    FEW_ROWS,
    SPLITK_MAX_ROWS,
    SPLITK_UNITS_MAX_ROWS,
    unit_atoms,
)
from dakrun.hardware import Card
from dakrun.launches.splitk import tiles_for
from dakrun.launches.tiled import shapes
from dakrun.units import ceil_div

By = Literal["splitk", "tiled", "torch"]

# Bytes of W and X that a CTA of SplitK_GEMM reads, up to which it beats the tiled GEMM for more
# than FEW_ROWS rows: decode steps of 64 requests take 9% less for OPT-125m, 11% for OPT-350m. A
# W of 2048x2048, 320 KiB per CTA, takes 6.2 us instead of 7.6 in a chain of products alone, but
# makes OPT-1.3b's step, with norms between products, 7% slower.
MAX_SKINNY_BYTES = 256 * 1024


def splitk_rows(atom_bytes: int) -> int:
    """Rows of X in one launch of SplitK_GEMM, for a W whose atoms have `atom_bytes`."""
    return SPLITK_UNITS_MAX_ROWS if unit_atoms(atom_bytes) > 1 else SPLITK_MAX_ROWS


def tiled_rows(card: Card, atom_bytes: int = ATOM_BYTES) -> int:
    """Rows of X up to which the tiled GEMM multiplies a W whose atoms have `atom_bytes`.

    0 if the card has no room for its rings: 99 KiB are not enough for elements of 8 bits with many
    scales.
    """
    return card.tiled_rows if shapes(card, atom_bytes=atom_bytes) else 0


def few_rows(card: Card, atom_bytes: int = ATOM_BYTES) -> int:
    """Rows of X up to which SplitK_GEMM is the fastest kernel; it may launch twice.

    With mma.sync the tiled GEMM is no faster for rows that one launch of SplitK_GEMM takes: H100,
    a W of 28672 x 4096, 79 us for 64 rows, where the tiled GEMM takes 115 us for 128.
    """
    most = splitk_rows(atom_bytes)
    if not tiled_rows(card, atom_bytes):
        return 2 * most
    return min(FEW_ROWS, most) if card.has_wgmma else most


def kernel_for(
    n: int,
    row_blocks: int,
    cols: int,
    *,
    remote: bool,
    card: Card,
    atom_bytes: int = ATOM_BYTES,
) -> By:
    """The kernel for `n` rows of X and a W of `row_blocks` and `cols` columns.

    `remote`: whether a part of W is remote. An atom of W has `atom_bytes`. For numbers of rows that
    both kernels take, SplitK_GEMM is chosen where an SM reads few bytes of X and W: then the tiled
    GEMM's longer start and end cost more than its products gain.
    """
    most, once = few_rows(card, atom_bytes), splitk_rows(atom_bytes)
    if n <= (min(most, once) if remote else most):  # two launches would read W twice
        return "splitk"
    if n > tiled_rows(card, atom_bytes):
        return "torch"
    if n > once:
        return "tiled"
    x, w = ATOM_BYTES * tiles_for(n), atom_bytes * ceil_div(row_blocks, card.sms)
    return "splitk" if cols * (x + w) <= MAX_SKINNY_BYTES * ATOM_COLS else "tiled"
