"""Costs of attention and of greedy sampling in decode steps.

Chains of launches in CUDA graphs over random values in the HBM buffer. Knows no profiles.
"""

import itertools
import statistics
from collections.abc import Sequence

import torch

from dakrun.geometry import FEW_ROWS, KV_BLOCK
from dakrun.hardware import Sweep
from dakrun.kernels import select_token
from dakrun.kernels.attention import (
    AttentionWorkspace,
    BlockTables,
    KVShape,
    attention_config,
    list_items,
    splitk_flash_attn,
)
from dakrun.lab.chain import Launch, launch_seconds, seconds_round_robin
from dakrun.lab.probe import gemm_costs as costs
from dakrun.lab.probe.sweeps import Bench, rounded

HEADS, HEAD_DIM = 32, 128
LONG_BYTES = 384 * 2**20  # bytes of all long slots together
ROW_BLOCKS = 1536, 512  # weights of HEADS * HEAD_DIM columns before and after attention
VOCABULARIES = 2**15, 2**17
MAX_LOGITS = 512  # maximum operands of a chain; the smallest ones then take 256 MiB in total


def attention_sweep(bench: Bench) -> Sweep:
    """Seconds that SplitK_FlashAttn adds to a decode step, by slots and the bytes of all slots.

    Short slots (one block): the difference between chains of the surrounding products with and
    without attention. Long slots: that, plus the difference between long and short slots in chains
    of attention alone. Chains with products would hide the latter difference: the times of products
    vary by as much, with power and with the SMs that are free first. More than FEW_ROWS slots are
    measured under load. Batches that exceed the buffer get fewer or shorter slots.
    """
    weights, memory = costs.random_memory(bench).chunk(2)
    block, rows = KVShape(HEADS, HEAD_DIM, KV_BLOCK).slot_bytes, []
    for slots in sorted({min(n, memory.numel() // (2 * block)) for n in bench.effort.slots}):
        heads = costs.random(weights, slots, HEADS * HEAD_DIM)
        blocks = max(2, min(memory.numel(), LONG_BYTES) // (slots * block))
        short, long = (_attention(bench, memory, n, heads) for n in (1, blocks))
        chains = [*_with_products(bench, weights, short[0], heads), short, long]
        times = seconds_round_robin(chains, replays=bench.effort.runs, load=slots > FEW_ROWS)
        added = _differences(times[0], times[1])
        # Add the short slots' median, not their samples, whose scatter would count twice.
        longer = [s + statistics.median(added) for s in _differences(times[3], times[2])]
        rows += [costs.row(slots, slots * n * block, s) for n, s in ((1, added), (blocks, longer))]
    return rounded(costs.COLUMNS, rows)


def sampling_sweep(bench: Bench) -> Sweep:
    """Greedy selections by rows and bytes of logits; each launch reads other logits."""
    memory, rows = costs.random_memory(bench), []
    for n, vocabulary in itertools.product(bench.effort.slots, VOCABULARIES):
        size = 2 * n * vocabulary
        found = costs.pieces(memory, size)[:MAX_LOGITS]
        logits = [piece.view(costs.DTYPE).view(n, vocabulary) for piece in found]
        seconds = launch_seconds(_selecting(logits), len(logits), replays=bench.effort.runs)
        rows.append(costs.row(n, size, seconds))
    return rounded(costs.COLUMNS, rows)


def _selecting(logits: Sequence[torch.Tensor]) -> Launch:
    """A launch of greedy selection from one of `logits`, each [N, V]."""
    n, device = len(logits[0]), logits[0].device
    tokens, lengths = torch.zeros(2, n, dtype=torch.int32, device=device)
    slots = torch.arange(n, dtype=torch.int32, device=device)
    log = torch.zeros(n, 8, dtype=torch.int32, pin_memory=device.type == "cuda")

    def launch(number: int) -> None:
        select_token(logits[number], tokens, lengths, slots, log, pdl=True)

    return launch


def _with_products(
    bench: Bench, memory: torch.Tensor, attend: Launch, heads: torch.Tensor
) -> list[tuple[Launch, int]]:
    """Chains of the products around attention, with and without `attend`, which writes `heads`."""
    memory_before, memory_after = memory.split(memory.numel() // 4 * 3)
    x = costs.random(memory, *heads.shape)
    (before, count), _ = costs.normed_product(bench, memory_before, ROW_BLOCKS[0], x)
    (after, count_after), _ = costs.product(bench, memory_after, ROW_BLOCKS[1], heads)
    weights = min(count, count_after)

    def both(number: int) -> None:
        before(number)
        attend(number)
        after(number)

    def without(number: int) -> None:
        before(number)
        after(number)

    return [(both, weights), (without, weights)]


def _attention(
    bench: Bench, memory: torch.Tensor, blocks: int, out: torch.Tensor
) -> tuple[Launch, int]:
    """A launch of attention to one of the sets of slots in `memory`, and the number of sets.

    All slots have `blocks` KV blocks; a set has a slot for each row of `out`. The launch reduces
    its operand modulo the number of sets.
    """
    shape, count = KVShape(HEADS, HEAD_DIM, KV_BLOCK * blocks), len(out)
    alone = count > FEW_ROWS
    config = attention_config(shape, (count,), costs.ACCESS, card=bench.card, alone=alone)
    workspace = AttentionWorkspace.empty([config], 1, memory.device)
    q, k, v = costs.random(memory, 3, count, HEADS, HEAD_DIM)
    lengths = torch.full((count,), shape.positions - 1, dtype=torch.int32, device=memory.device)
    slots = [piece.data_ptr() for piece in costs.pieces(memory, shape.slot_bytes)]
    starts = torch.tensor(slots[: len(slots) // count * count], device=memory.device)
    sets = [BlockTables.of_slots(some, shape) for some in starts.view(-1, count)]

    list_items(lengths, config, workspace)
    if memory.is_cuda:  # a launch reads the list before its PDL wait
        torch.cuda.synchronize(memory.device)

    def launch(number: int) -> None:
        splitk_flash_attn(
            q, k, v, sets[number % len(sets)], lengths, config, workspace, out,
            scale=HEAD_DIM**-0.5, pdl=True,
        )  # fmt: skip

    return launch, len(sets)


def _differences(more: Sequence[float], less: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(more, less, strict=True)]
