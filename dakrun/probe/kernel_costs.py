"""How long the project's products take, launched as in a decode step: in chains, in CUDA graphs.

Knows a buffer in HBM, which it fills with random values, and the kernels; no profiles.
"""

import itertools
import statistics
from collections.abc import Sequence

import torch

from dakrun.geometry import FEW_ROWS, ROWS_PER_BLOCK
from dakrun.hardware.profile import LOCAL, Sweep
from dakrun.kernels.gemm.dispatch import Products, tiles
from dakrun.kernels.gemm.packing import PackedPart, PackedTensor, row_block_bytes
from dakrun.kernels.gemm.splitk_config import TierAccess, split_row_blocks
from dakrun.kernels.normalize import normalize
from dakrun.probe.chain import Launch, launch_seconds
from dakrun.probe.measurement import spread
from dakrun.probe.sweeps import Bench, rounded

DTYPE = torch.float16
ACCESS = (TierAccess(),)
CHAIN_BYTES = 2**31  # of different operands, at most: L2 keeps far less
WEIGHTS = (512, 4096), (3584, 7168)  # row blocks and columns: 32 and 392 MiB
EPS = 1e-5
COLUMNS = ("n", "op_bytes", "op_s", "bytes_per_s", "spread")


def linear_sweep(bench: Bench) -> Sweep:
    """Chains of products by rows of X and bytes of a weight; each launch reads another weight.

    Smaller weights stand in where the buffer has no room.
    """
    memory, rows = random_memory(bench), []
    for n, (row_blocks, cols) in itertools.product(bench.effort.rows, WEIGHTS):
        row_blocks = min(row_blocks, memory.numel() // row_block_bytes(cols))
        launch, weights = product(bench, memory, row_blocks, random(memory, n, cols))
        seconds = launch_seconds(launch, weights, replays=bench.effort.runs)
        rows.append(row(n, row_blocks * row_block_bytes(cols), seconds))
    return rounded(COLUMNS, rows)


def product(
    bench: Bench,
    memory: torch.Tensor,
    row_blocks: int,
    x: torch.Tensor,
    *,
    norm: bool = False,
    pdl: bool = True,
) -> tuple[Launch, int]:
    """x [N, K] times one of the weights, of so many row blocks, that `memory` holds; their number.

    With `norm` few rows are normalised on the way.
    """
    n, cols = x.shape
    (split,) = split_row_blocks([row_blocks], ACCESS, sms=bench.sms)
    out = x.new_empty(n, ROWS_PER_BLOCK * row_blocks)
    weights = [
        PackedTensor((out.shape[1], cols), DTYPE, (PackedPart(LOCAL, split, data),))
        for data in pieces(memory, row_blocks * row_block_bytes(cols))
    ]
    products = Products(x.device)

    def launch(number: int) -> None:
        following = weights[(number + 1) % len(weights)]
        products(
            x, weights[number], ACCESS, out, norm="layer" if norm else "none", eps=EPS,
            pdl=pdl, ahead=products.ahead(n, following, ACCESS),
        )  # fmt: skip

    return launch, len(weights)


def normed_product(
    bench: Bench, memory: torch.Tensor, row_blocks: int, x: torch.Tensor
) -> tuple[Launch, int]:
    """The same with a norm of x ahead, as in a decode step.

    Few rows are normalised by the product itself. Many are by a launch of its own; where torch is
    to multiply most of them, a product starts when that has ended.
    """
    few = len(x) <= FEW_ROWS
    pdl = few or tiles(x.device) is not None
    launch, count = product(bench, memory, row_blocks, x, norm=few, pdl=pdl)
    if few:
        return launch, count

    def both(number: int) -> None:
        normalize(x, x, "layer", eps=EPS, pdl=True)
        launch(number)

    return both, count


def random_memory(bench: Bench) -> torch.Tensor:
    """The buffer, or so much of it as a chain reads, with normal values in it: uint8, 1-D."""
    memory = bench.hbm.tensor[:CHAIN_BYTES]
    block = random(memory, 2**25)
    for part in memory.view(DTYPE).split(len(block)):
        part.copy_(block[: len(part)])
    return memory


def random(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Normal values of DTYPE where `like` lies."""
    return torch.randn(shape, dtype=DTYPE, device=like.device)


def pieces(memory: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """As many pieces of `size` bytes as there are."""
    return memory[: memory.numel() // size * size].split(size)


def row(n: int, nbytes: int, seconds: Sequence[float]) -> tuple[float, ...]:
    """Under COLUMNS."""
    op = statistics.median(seconds)
    return n, nbytes, op, nbytes / op, spread(seconds)
