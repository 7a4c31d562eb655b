"""How long SplitK_FlashAttn takes, launched as in a decode step: in chains, in CUDA graphs.

Knows a buffer in HBM, which it fills with random values, and the kernels; no profiles.
"""

import statistics
from collections.abc import Sequence

import torch

from dakrun.geometry import FEW_ROWS, KV_BLOCK
from dakrun.hardware import Sweep
from dakrun.kernels.attention.config import attention_config
from dakrun.kernels.attention.kv_blocks import KVShape
from dakrun.kernels.attention.splitk import Workspace, splitk_flash_attn
from dakrun.kernels.gemm.packing import row_block_bytes
from dakrun.probe.chain import Launch, seconds_in_turns
from dakrun.probe.kernel_costs import (
    ACCESS,
    COLUMNS,
    normed_product,
    pieces,
    product,
    random,
    random_memory,
    row,
)
from dakrun.probe.sweeps import Bench, rounded

HEADS, HEAD_DIM = 32, 128
LONG_BYTES = 384 * 2**20  # of all slots, where they are long
ROW_BLOCKS = 1536, 512  # of the products before and behind it, of HEADS * HEAD_DIM columns


def attention_sweep(bench: Bench) -> Sweep:
    """What SplitK_FlashAttn adds to a decode step, by slots and the bytes of all of them.

    Short slots: what it adds to a chain of the products that it stands between. What long ones take
    more is measured by chains of attention alone, as it is reading, whatever stands beside; beside
    products it would drown in theirs, which vary with power and with the SMs that are free first.
    Many slots have their turns under load. Fewer or shorter ones stand in where the buffer has no
    room.
    """
    weights, memory = random_memory(bench).chunk(2)
    block, rows = KVShape(HEADS, HEAD_DIM, KV_BLOCK).slot_bytes, []
    for slots in sorted({min(n, memory.numel() // (2 * block)) for n in bench.effort.slots}):
        heads = random(weights, slots, HEADS * HEAD_DIM)
        blocks = max(2, min(memory.numel(), LONG_BYTES) // (slots * block))
        short, long = (_attention(bench, memory, n, heads) for n in (1, blocks))
        chains = [*_between(bench, weights, short[0], heads), short, long]
        times = seconds_in_turns(chains, replays=bench.effort.runs, load=slots > FEW_ROWS)
        added = _less(times[0], times[1])
        # A median for what short slots take: its scatter would count twice.
        more = [seconds + statistics.median(added) for seconds in _less(times[3], times[2])]
        rows += [row(slots, slots * n * block, s) for n, s in ((1, added), (blocks, more))]
    return rounded(COLUMNS, rows)


def _between(
    bench: Bench, memory: torch.Tensor, attend: Launch, heads: torch.Tensor
) -> list[tuple[Launch, int]]:
    """Chains of the products around attention, with it and without, whose output is `heads`."""
    ahead, behind = memory.split(memory.numel() // 4 * 3)
    size = row_block_bytes(heads.shape[1])
    most = (
        min(n, part.numel() // size) for n, part in zip(ROW_BLOCKS, (ahead, behind), strict=True)
    )
    before, count = normed_product(bench, ahead, next(most), random(memory, *heads.shape))
    after, least = product(bench, behind, next(most), heads)

    def both(number: int) -> None:
        before(number)
        attend(number)
        after(number)

    def without(number: int) -> None:
        before(number)
        after(number)

    return [(both, min(count, least)), (without, min(count, least))]


def _attention(
    bench: Bench, memory: torch.Tensor, blocks: int, out: torch.Tensor
) -> tuple[Launch, int]:
    """Attention to one of the sets of slots that `memory` holds, all `blocks` long; their number.

    Any number is taken: sets have their turns.
    """
    shape, count = KVShape(HEADS, HEAD_DIM, KV_BLOCK * blocks), len(out)
    alone = count > FEW_ROWS
    config = attention_config(shape, (count,), ACCESS, sms=bench.sms, alone=alone)
    workspace = Workspace.empty(config, 1, memory.device)
    q, k, v = random(memory, 3, count, HEADS, HEAD_DIM)
    lengths = torch.full((count,), shape.positions - 1, dtype=torch.int32, device=memory.device)
    slots = [piece.data_ptr() for piece in pieces(memory, shape.slot_bytes)]
    sets = torch.tensor(slots[: len(slots) // count * count], device=memory.device).view(-1, count)

    def launch(number: int) -> None:
        splitk_flash_attn(
            q, k, v, sets[number % len(sets)], lengths, config, workspace, out,
            scale=HEAD_DIM**-0.5, pdl=True,
        )  # fmt: skip

    return launch, len(sets)


def _less(more: Sequence[float], less: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(more, less, strict=True)]
