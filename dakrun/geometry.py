"""Sizes that planner, Python wrappers and CUDA kernels share, and how CTAs group row blocks.

The constants of CUDA_CONSTANTS reach the kernels as macros of the same names, one `-D` each in
every compilation (dakrun/kernels/runtime/nvrtc.py); native/geometry.cuh names those that several
kernels use. A row block, 8 whole rows of a matrix, is the unit in which a matrix is placed in
tiers, stored and computed. Needs neither torch nor a GPU.
"""

import functools
from collections.abc import Collection

from dakrun.units import ceil_div

# Packed matrices
ROWS_PER_BLOCK = 8  # rows of a row block; the last row block of a matrix may have fewer
CHUNK = 8  # 16-bit elements of a 16-byte chunk, the unit of vector loads and of swizzling
ATOM_COLS = 64  # columns of an atom: one swizzled row of 128 bytes
ATOM_BYTES = 2 * ROWS_PER_BLOCK * ATOM_COLS  # bytes of an atom: 8 rows of 64 16-bit elements
UNIT_ATOMS = 2  # atoms of a unit, the smallest piece of formats of fewer than 16 bits
UNIT_COLS = UNIT_ATOMS * ATOM_COLS  # columns of a unit
MAX_TIERS = 9  # tiers of one matrix or KV cache: HBM, host memory and seven peers
MAX_GROUP_ROW_BLOCKS = 16  # row blocks that a CTA multiplies together
TILE_ROW_BLOCKS = 8  # row blocks that a warpgroup multiplies together: 64 rows, as wgmma has
WARPGROUPS = 2  # warpgroups of a GEMM's CTA that multiply

# KV cache
KV_BLOCK = 64  # positions of a KV block
HEAD_DIMS = (64, 80, 96, 128)  # head sizes with an attention kernel
MAX_GROUP_HEADS = 16  # query heads of one KV head in SplitK_FlashAttn

KERNEL_TARGETS = ("sm_90a", "sm_100a", "sm_120a", "sm_121a")  # that kernels are compiled for

# SplitK_GEMM
SPLITK_MAX_ROWS = 64  # rows of X in one launch
SPLITK_UNITS_MAX_ROWS = 16  # the same where W has units, which take more registers
SPLITK_X_TILES = (1, 2, 4, 8)  # kernel variants by their number of tiles of 8 rows of X
SPLITK_MAX_STAGES = 16
SPLITK_THREADS = 128 * WARPGROUPS + 2 * 32  # per CTA: warpgroups that multiply, two warps that copy

# Tiled GEMM
TILED_MAX_ROWS = 4096  # rows of X in one launch
TILED_X_TILES = (8, 16, 24, 32)  # kernel variants by tiles of 8 rows of X per warpgroup
TILED_PORTABLE_X_TILES = (8,)  # variants for GPUs without wgmma
TILED_WIDE_TILES = (12, 24, 28)  # variants of 64 rows of X by this many tiles of 8 rows of W
# A tall tile multiplies as many tiles of 8 rows of X as it has, rounded up to one of these; with
# more, accumulators would leave too few registers.
TILED_TALL_SIZES = (8, 12, 16, 24, 28, 32, 34, 36, 40)
TILED_MAX_STAGES = 13
LINE_BYTES = 128  # of L2; over a link each line that a copy touches is a request of its own
TILED_UNIT_STAGES = 3  # of the ring from which units of W are expanded
TILED_THREADS = 128 * (WARPGROUPS + 1)  # per CTA: warpgroups that multiply, one that copies
TILED_PASS_TILES = 4  # accumulator tiles of a warp in one block of outputs in shared memory
TILED_MIN_OUTPUT_BLOCKS = 3  # minimum of such blocks per warp

# SplitK_FlashAttn
ATTENTION_MAX_STAGES = 16
# Of a CTA's ring at most, where heads are long: with more in flight, HBM delivers less. Shorter
# heads need more under way, however many there are. With 6 and 7 stages of 16 KiB an H200 read 64
# slots of 2,048 positions and 8 KV heads at 93.7% and 93.0% of HBM's rate, 16 of 8,192 at 92.1% and
# 91.3%; but 32 of 2,048 at 91.8% and 93.2%, and 128 of 1,040 with 32 KV heads at 94.5% and 95.8%
# (bench --kernel attention --case 64:32/8:2048 and so on, 2026-11-29, at f1c93cfd).
ATTENTION_RING_BYTES = 96 << 10
ATTENTION_LONG_BLOCKS = 64  # KV blocks of a head, or of two where each SM has two to read
ATTENTION_WARPS = 7  # warps of a CTA that compute, for up to 8 query heads per KV head
ATTENTION_WARPS_LARGE_GROUP = 3  # the same for more query heads, which need more registers
ATTENTION_MAX_SPLITS = 128  # splits of one KV head of a slot, each of one CTA
ATTENTION_PARTIAL_EXTRA = 4  # floats behind a partial output: row_max, row_sum, two of padding

# Prompt attention
PROMPT_MAX_STAGES = 12  # of the ring: keys or values of a KV block each
PROMPT_PRODUCER_WARPS = 4
PROMPT_THREADS = 128 * WARPGROUPS + 32 * PROMPT_PRODUCER_WARPS  # per CTA
PROMPT_PART_ROWS = 64  # rows, of a query and a head each, that a warpgroup attends from
GRAPHED_TOKENS = 1024  # of the largest pass with prompts that may be a CUDA graph
GRAPHED_ROWS = 64  # decode rows of such a pass, at most: with more, few passes are alike
# Such passes are padded to these numbers of tokens, so that few graphs are enough. The first ones
# are those of decode steps, whose kernels do not round differently for a few rows more or less.
PASS_SIZES = (8, 16, 32, 64, 128, 192, 256, *range(384, GRAPHED_TOKENS + 1, 128))

# Other kernels
BANDWIDTH_MAX_SOURCES = 10  # readers of one launch
BANDWIDTH_MAX_STAGES = 64
ELEMENTWISE_THREADS = 256  # per CTA of embed, store_kv, unpack and list_items
UNPACK_ATOMS = 4  # atoms per warp of unpack
ROW_THREADS = 1024  # per CTA of select_token; the maximum per CTA of normalize
NORMALIZE_SHARING_COLS = CHUNK * ROW_THREADS  # of rows up to which CTAs of normalize share an SM
NORMALIZE_MAX_COLS = 2 * NORMALIZE_SHARING_COLS  # maximum columns of a row
DRAFT_THREADS = 256  # per CTA of draft_tokens, which has one row
DRAFT_MAX_TOKENS = 32  # of a row in a step with drafts
LONGEST_MATCH = 32  # tokens of a text's end that are compared to find drafts, at most
NO_TOKEN = -1  # instead of the token of a row whose largest logit is NaN or infinite
NONE_ALLOWED = -2  # instead of the token of a row whose grammar allows none

CUDA_CONSTANTS = {
    "ROWS_PER_BLOCK": ROWS_PER_BLOCK,
    "CHUNK": CHUNK,
    "ATOM_COLS": ATOM_COLS,
    "ATOM_BYTES": ATOM_BYTES,
    "UNIT_ATOMS": UNIT_ATOMS,
    "MAX_TIERS": MAX_TIERS,
    "TILE_ROW_BLOCKS": TILE_ROW_BLOCKS,
    "WARPGROUPS": WARPGROUPS,
    "KV_BLOCK": KV_BLOCK,
    "SPLITK_MAX_STAGES": SPLITK_MAX_STAGES,
    "SPLITK_THREADS": SPLITK_THREADS,
    "TILED_TALL_SIZES": ",".join(map(str, TILED_TALL_SIZES)),
    "TILED_MAX_STAGES": TILED_MAX_STAGES,
    "TILED_UNIT_STAGES": TILED_UNIT_STAGES,
    "TILED_THREADS": TILED_THREADS,
    "TILED_PASS_TILES": TILED_PASS_TILES,
    "TILED_MIN_OUTPUT_BLOCKS": TILED_MIN_OUTPUT_BLOCKS,
    "ATTENTION_MAX_STAGES": ATTENTION_MAX_STAGES,
    "ATTENTION_WARPS": ATTENTION_WARPS,
    "ATTENTION_WARPS_LARGE_GROUP": ATTENTION_WARPS_LARGE_GROUP,
    "ATTENTION_MAX_SPLITS": ATTENTION_MAX_SPLITS,
    "ATTENTION_PARTIAL_EXTRA": ATTENTION_PARTIAL_EXTRA,
    "PROMPT_PRODUCER_WARPS": PROMPT_PRODUCER_WARPS,
    "PROMPT_PART_ROWS": PROMPT_PART_ROWS,
    "BANDWIDTH_MAX_SOURCES": BANDWIDTH_MAX_SOURCES,
    "BANDWIDTH_MAX_STAGES": BANDWIDTH_MAX_STAGES,
    "ELEMENTWISE_THREADS": ELEMENTWISE_THREADS,
    "UNPACK_ATOMS": UNPACK_ATOMS,
    "ROW_THREADS": ROW_THREADS,
    "DRAFT_THREADS": DRAFT_THREADS,
    "DRAFT_MAX_TOKENS": DRAFT_MAX_TOKENS,
    "LONGEST_MATCH": LONGEST_MATCH,
    "NO_TOKEN": NO_TOKEN,
    "NONE_ALLOWED": NONE_ALLOWED,
}

FEW_ROWS = 32  # rows of X up to which SplitK_GEMM beats the tiled GEMM, and applies the norm itself
# Costs with which even_group() compares group sizes.
X_READ_COST = 0.25  # cost of reading X for a group, in row blocks
EPILOGUE_COST = 0.05  # cost of storing a CTA's last group, per row block of the group


def padded_tokens(tokens: int) -> int:
    """Tokens of a pass of `tokens`, idle ones included: a size of PASS_SIZES, if it is small."""
    return next((size for size in PASS_SIZES if size >= tokens), tokens)


def row_block_count(rows: int) -> int:
    """Row blocks of a matrix of `rows`."""
    return ceil_div(rows, ROWS_PER_BLOCK)


def unit_atoms(atom_bytes: int) -> int:
    """Atoms along the columns that lie together in a format whose atoms have `atom_bytes`."""
    return 1 if atom_bytes == ATOM_BYTES else UNIT_ATOMS


def first_row(row_block: int, rows: int) -> int:
    """First row of a row block of a matrix of `rows`; `rows` past the last row block."""
    return min(row_block * ROWS_PER_BLOCK, rows)


def group_count(group: int, row_blocks: int, mixed: int = 0) -> int:
    """Groups of up to `group` of a tier's `row_blocks`, and of another tier's `mixed` ones."""
    return ceil_div(row_blocks, group) + ceil_div(mixed, group)


@functools.cache
def even_group(
    row_blocks: int,
    ctas: int,
    mixed: int = 0,
    sizes: Collection[int] = range(1, MAX_GROUP_ROW_BLOCKS + 1),
) -> int:
    """Choose the group size, one of `sizes`, that gives the busiest of `ctas` the least work.

    Groups of a tier's row blocks are assigned to CTAs round-robin, and with them groups of the
    `mixed` row blocks of another tier. A CTA's work is its row blocks, reading X once per group,
    and storing the outputs of its last group, which overlaps with nothing.
    """

    def work(group: int) -> float:
        groups = ceil_div(group_count(group, row_blocks, mixed), ctas)
        return groups * (group + X_READ_COST) + EPILOGUE_COST * group

    return min(sorted(sizes, reverse=True), key=work) if row_blocks or mixed else 1
