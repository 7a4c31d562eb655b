"""What an op costs beyond its bytes where the copy engine has brought a part of its weight.

Knows buffers in HBM and in a remote tier, and how decode steps stage matrices; no profiles.
"""

from collections.abc import Sequence

import torch

from dakrun.engine.staging import Staging, staged_bytes
from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm.packing import PackedPart, PackedTensor, row_block_bytes
from dakrun.kernels.gemm.splitk import splitk_gemm
from dakrun.kernels.gemm.splitk_config import TierAccess, gemm_config, split_row_blocks
from dakrun.probe.chain import graph_seconds
from dakrun.probe.kernel_costs import DTYPE, pieces, random, random_memory
from dakrun.probe.sweeps import Bench, Buffer

ROW_BLOCKS, COLS = 1536, 4096  # of a weight: 96 MiB
STAGED_ROW_BLOCKS = 8  # copied while ops before read HBM
ROWS = 8
BUFFERS = 2
MAX_OPS = 64
ACCESSES = TierAccess(), TierAccess(1)


def staged_seconds(bench: Bench, remote: Buffer) -> list[float]:
    """What staging adds to each product of a chain, though its copy takes less than a product.

    It starts when its copy has ended, and not beside the op before.
    """
    splits = split_row_blocks(
        [ROW_BLOCKS - STAGED_ROW_BLOCKS, STAGED_ROW_BLOCKS], ACCESSES, sms=bench.sms
    )
    config = gemm_config(ROWS, list(splits), ACCESSES, sms=bench.sms)
    row_block, memory = row_block_bytes(COLS), random_memory(bench)
    x = random(memory, ROWS, COLS)
    out = x.new_empty(ROWS, ROW_BLOCKS * ROWS_PER_BLOCK)
    whole = pieces(memory, ROW_BLOCKS * row_block)[:MAX_OPS]
    there = pieces(remote.tensor, STAGED_ROW_BLOCKS * row_block)

    def matrices(far: Sequence[torch.Tensor]) -> dict[str, PackedTensor]:
        near = (ROW_BLOCKS - STAGED_ROW_BLOCKS) * row_block
        return {
            str(number): PackedTensor(
                (out.shape[1], COLS),
                DTYPE,
                (
                    PackedPart(LOCAL, splits[0], data[:near]),
                    PackedPart("remote", splits[1], far[number % len(far)]),
                ),
            )
            for number, data in enumerate(whole)
        }

    resident = matrices([data[-STAGED_ROW_BLOCKS * row_block :] for data in whole])
    far = matrices(there)
    sizes = [staged_bytes(weight) for weight in far.values()]
    ring = torch.empty(BUFFERS * max(sizes), dtype=torch.uint8, device=memory.device)
    staged = Staging(far, list(far), ring)
    staged.fill()

    def ahead() -> None:
        staged.begin()
        for name in resident:
            pdl = not staged.has(name)
            splitk_gemm(x, staged.fetch(name), config, out, pdl=pdl)
            staged.release(name)
        staged.end()

    def in_place() -> None:
        for weight in resident.values():
            splitk_gemm(x, weight, config, out, pdl=True)

    more, less = (graph_seconds(step, bench.effort.runs) for step in (ahead, in_place))
    return [(a - b) / len(resident) for a, b in zip(more, less, strict=True)]
