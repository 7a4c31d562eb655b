"""How long the project's own kernels take, launched as in a decode step: in chains, in CUDA graphs.

Knows a buffer in HBM, which it fills with random values, and the kernels; no profiles.
"""

import itertools
import statistics
from collections.abc import Sequence

import torch

from dakrun.hardware import LOCAL, Sweep
from dakrun.kernels.attention import Workspace, splitk_flash_attn
from dakrun.kernels.attention_heuristics import attention_config
from dakrun.kernels.gemm import splitk_gemm
from dakrun.kernels.heuristics import MAX_ROWS, TierAccess, gemm_config, split_octets
from dakrun.kernels.kv_blocks import BLOCK, KVShape
from dakrun.kernels.packing import PackedPart, PackedTensor, octet_bytes
from dakrun.models.many_rows import ManyRows
from dakrun.octets import OCTET_ROWS
from dakrun.probe.chain import Launch, launch_seconds
from dakrun.probe.measurement import spread
from dakrun.probe.sweeps import Bench, rounded

DTYPE = torch.float16
ACCESS = (TierAccess(),)
CHAIN_BYTES = 2**31  # of different operands, at most: L2 keeps far less
WEIGHTS = (512, 4096), (3584, 7168)  # octets and columns: 32 and 392 MiB
HEADS, HEAD_DIM = 32, 128
EPS = 1e-5
ATTENTION_BYTES = 384 * 2**20  # of all slots, where they are long
COLUMNS = ("n", "op_bytes", "op_s", "bytes_per_s", "spread")


def linear_sweep(bench: Bench) -> Sweep:
    """Chains of SplitK_GEMM by rows of X and bytes of a weight; each launch reads another weight.

    Smaller weights stand in where the buffer has no room.
    """
    memory, rows = random_memory(bench), []
    for n, (octets, cols) in itertools.product(bench.effort.rows, WEIGHTS):
        octets = min(octets, memory.numel() // octet_bytes(cols))
        launch, weights = product(bench, memory, octets, random(memory, n, cols))
        seconds = launch_seconds(launch, weights, replays=bench.effort.runs)
        rows.append(row(n, octets * octet_bytes(cols), seconds))
    return rounded(COLUMNS, rows)


def attention_sweep(bench: Bench) -> Sweep:
    """What SplitK_FlashAttn adds to each launch of a chain of products, by slots and their bytes.

    Each product reads what attention before it wrote. Fewer or shorter slots stand in where the
    buffer has no room.
    """
    weights, memory = random_memory(bench).chunk(2)
    block, rows = KVShape(HEADS, HEAD_DIM, BLOCK).slot_bytes, []
    for slots in sorted({min(n, memory.numel() // (2 * block)) for n in bench.effort.slots}):
        heads = random(weights, slots, HEADS * HEAD_DIM)
        linear, count = product(bench, weights, WEIGHTS[0][0], heads)
        alone = launch_seconds(linear, count, replays=bench.effort.runs)
        room = min(memory.numel(), ATTENTION_BYTES) // (slots * block)
        for blocks in (1, max(2, room)):
            attend = _attention(bench, memory, blocks, heads)

            def layer(number: int, attend: Launch = attend, linear: Launch = linear) -> None:
                attend(number)
                linear(number)

            both = launch_seconds(layer, count, replays=bench.effort.runs)
            added = [more - less for more, less in zip(both, alone, strict=True)]
            rows.append(row(slots, slots * blocks * block, added))
    return rounded(COLUMNS, rows)


def product(
    bench: Bench,
    memory: torch.Tensor,
    octets: int,
    x: torch.Tensor,
    *,
    norm: bool = False,
    overlap: bool = True,
) -> tuple[Launch, int]:
    """x [N, K] times one of the weights, of so many octets, that `memory` holds; their number.

    With `norm` few rows are normalised on the way.
    """
    n, cols = x.shape
    (split,) = split_octets([octets], ACCESS, sms=bench.sms)
    out = x.new_empty(n, OCTET_ROWS * octets)
    weights = [
        PackedTensor((out.shape[1], cols), DTYPE, (PackedPart(LOCAL, split, data),))
        for data in pieces(memory, octets * octet_bytes(cols))
    ]
    many = ManyRows(x.device)
    if n > min(many.few_rows, MAX_ROWS):

        def launch_many(number: int) -> None:
            many(
                x, weights[number], ACCESS, out, bias=None, residual=None, activation="none",
                overlap=overlap,
            )  # fmt: skip

        return launch_many, len(weights)
    config = gemm_config(n, [split], ACCESS, sms=bench.sms)

    def launch(number: int) -> None:
        splitk_gemm(
            x, weights[number], config, out, norm="layer" if norm else "none", eps=EPS,
            overlap=overlap,
        )  # fmt: skip

    return launch, len(weights)


def _attention(bench: Bench, memory: torch.Tensor, blocks: int, out: torch.Tensor) -> Launch:
    """Attention to one of the sets of slots that `memory` holds, all of them `blocks` long."""
    shape, count = KVShape(HEADS, HEAD_DIM, BLOCK * blocks), len(out)
    config = attention_config(shape, (count,), ACCESS, sms=bench.sms)
    workspace = Workspace.empty(config, 1, memory.device)
    q, k, v = random(memory, 3, count, HEADS, HEAD_DIM)
    lengths = torch.full((count,), shape.positions - 1, dtype=torch.int32, device=memory.device)
    slots = [piece.data_ptr() for piece in pieces(memory, shape.slot_bytes)]
    sets = torch.tensor(slots[: len(slots) // count * count], device=memory.device).view(-1, count)

    def launch(number: int) -> None:
        splitk_flash_attn(
            q, k, v, sets[number % len(sets)], lengths, config, workspace, out,
            scale=HEAD_DIM**-0.5, overlap=True,
        )  # fmt: skip

    return launch


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
