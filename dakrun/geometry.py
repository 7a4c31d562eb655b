"""The row block: 8 whole rows of a matrix, the unit in which it is placed, stored and computed.

A row block lies in one tier. The last one of a matrix may have fewer rows. The row blocks of a tier
are dealt out in turn, in groups, to its CTAs, one on each of its SMs. This is what planner and
kernels have to agree on.
"""

import functools

from dakrun.units import ceil_div

ROWS_PER_BLOCK = 8
FEW_ROWS = 32  # of X: what SplitK_GEMM multiplies faster than the tiled GEMM, and normalizes itself
MAX_GROUP = 16  # row blocks that a CTA multiplies together
SHARE_OF_X = 0.25  # what reading X for a group costs, in row blocks
TAIL = 0.05  # what storing a CTA's last group costs, in that group
# What two CTAs, one of this op and one of the next, can have of an SM's 228 KiB: 1 KiB each is the
# driver's, and 1 KiB is for barriers.
SHARED_BYTES = 112 * 1024


def row_block_count(rows: int) -> int:
    """Row blocks of a matrix of `rows`."""
    return ceil_div(rows, ROWS_PER_BLOCK)


def first_row(row_block: int, rows: int) -> int:
    """First row of a row block of a matrix of `rows`; past the last row block, `rows`."""
    return min(row_block * ROWS_PER_BLOCK, rows)


def group_count(group: int, row_blocks: int, mixed: int = 0) -> int:
    """Groups of up to `group` row blocks, each of them of one tier or of the one mixed with it."""
    return ceil_div(row_blocks, group) + ceil_div(mixed, group)


@functools.cache
def even_group(row_blocks: int, ctas: int, mixed: int = 0) -> int:
    """The group with which the busiest of `ctas` has least to do, of a tier's row blocks.

    That is its row blocks, for each group of them an X to read, and the last group's outputs, whose
    storing nothing hides. CTAs may also have `mixed` row blocks of another tier, in groups as
    large.
    """

    def work(group: int) -> float:
        groups = ceil_div(group_count(group, row_blocks, mixed), ctas)
        return groups * (group + SHARE_OF_X) + TAIL * group

    return min(range(MAX_GROUP, 0, -1), key=work) if row_blocks or mixed else 1
