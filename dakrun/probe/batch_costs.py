"""What decode steps cost beside reading: products of many rows, norms ahead of products, sampling.

Chains of launches in CUDA graphs, like kernel_costs.py's; knows no profiles.
"""

import itertools
from collections.abc import Sequence

import torch

from dakrun.geometry import FEW_ROWS
from dakrun.hardware.profile import Sweep
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.gemm.packing import row_block_bytes
from dakrun.kernels.select_greedy import select_greedy
from dakrun.probe.chain import Launch, launch_seconds, seconds_in_turns
from dakrun.probe.kernel_costs import (
    COLUMNS,
    DTYPE,
    normed_product,
    pieces,
    product,
    random,
    random_memory,
    row,
)
from dakrun.probe.sweeps import Bench, rounded

# Row blocks and columns: of 7B and 30B models, whose tiles fill the SMs more or less evenly.
WEIGHTS = (
    (512, 4096), (768, 4096), (2048, 4096), (3584, 4096), (512, 16384), (896, 7168), (2688, 7168),
    (3584, 7168),
)  # fmt: skip
NORM_COLS = 4096, 8192
# Of the product behind a norm: small beside the norm's launch, or of a layer's size where it is
# the product that normalises, as reading more would hide that.
NORM_ROW_BLOCKS = {False: 64, True: 768}
NORM_BYTES = 2**26  # of the weights of small products, which need not be read from HBM
MIN_SECONDS = 1e-8  # that are told from nothing
VOCABULARIES = 2**15, 2**17
MAX_LOGITS = 512  # of a chain: 256 MiB of the smallest


def many_rows(bench: Bench) -> tuple[int, ...]:
    """Rows to measure that are too many for SplitK_GEMM."""
    few = Products(bench.hbm.tensor.device).few_rows
    return tuple(n for n in bench.effort.many_rows if n > few)


def many_rows_sweep(bench: Bench) -> Sweep:
    """Chains of products of many rows by rows of X and bytes of a weight.

    Of each number of rows all weights have their turns under load: large products draw more power
    than a GPU can keep up for long, and it slows down after some tenths of a second. Smaller
    weights stand in where the buffer has no room.
    """
    memory, rows = random_memory(bench), []
    for n in many_rows(bench):
        sizes, chains = [], []
        for row_blocks, cols in WEIGHTS:
            row_blocks = min(row_blocks, memory.numel() // row_block_bytes(cols))
            sizes.append(row_blocks * row_block_bytes(cols))
            chains.append(product(bench, memory, row_blocks, random(memory, n, cols)))
        times = seconds_in_turns(chains, replays=bench.effort.runs, load=True)
        rows += [row(n, size, seconds) for size, seconds in zip(sizes, times, strict=True)]
    return rounded(COLUMNS, rows)


def norm_sweep(bench: Bench) -> Sweep:
    """What a norm of X adds to each launch of a chain of products, by rows and bytes of X.

    Bytes of X count twice: they are read and written.
    """
    memory, rows = random_memory(bench), []
    for n, cols in itertools.product((*bench.effort.rows, *many_rows(bench)), NORM_COLS):
        x, few = random(memory, n, cols), n <= FEW_ROWS
        row_blocks, weights = NORM_ROW_BLOCKS[few], memory if few else memory[:NORM_BYTES]
        chains = [f(bench, weights, row_blocks, x) for f in (normed_product, product)]
        more, less = seconds_in_turns(chains, replays=bench.effort.runs, load=False)
        added = [max(a - b, MIN_SECONDS) for a, b in zip(more, less, strict=True)]
        rows.append(row(n, 2 * x.nbytes, added))
    return rounded(COLUMNS, rows)


def sampling_sweep(bench: Bench) -> Sweep:
    """Chains of greedy selections by rows of logits and bytes of all; each reads other logits."""
    memory, rows = random_memory(bench), []
    for n, vocabulary in itertools.product(bench.effort.slots, VOCABULARIES):
        size = 2 * n * vocabulary
        found = pieces(memory, size)[:MAX_LOGITS]
        logits = [piece.view(DTYPE).view(n, vocabulary) for piece in found]
        seconds = launch_seconds(_selecting(logits), len(logits), replays=bench.effort.runs)
        rows.append(row(n, size, seconds))
    return rounded(COLUMNS, rows)


def _selecting(logits: Sequence[torch.Tensor]) -> Launch:
    """Greedy selection from one of `logits`, all [N, V]."""
    n, device = len(logits[0]), logits[0].device
    tokens, lengths = torch.zeros(2, n, dtype=torch.int32, device=device)
    slots = torch.arange(n, dtype=torch.int32, device=device)
    log = torch.zeros(n, 8, dtype=torch.int32, pin_memory=device.type == "cuda")

    def launch(number: int) -> None:
        select_greedy(logits[number], tokens, lengths, slots, log, pdl=True)

    return launch
