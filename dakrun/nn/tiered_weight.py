"""The weight of one matrix in two tiers: where its rows lie, its memory, how it is written.

Packed for SplitK_GEMM where that can be, else row by row. Knows tensors and tiers, no modules.
"""

import torch

from dakrun.geometry import first_row, row_block_count
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm import storage
from dakrun.kernels.gemm.packing import PackedTensor, row_block_bytes
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.kernels.runtime import jit
from dakrun.kernels.runtime.jit import sm_count
from dakrun.memory.tiers import PartitionedTensor, Tiers, aligned, allocate_tiers
from dakrun.nn.remote_tier import remote_count

TieredWeight = PackedTensor | PartitionedTensor


def has_kernel(like: torch.Tensor, cols: int) -> bool:
    """Whether SplitK_GEMM takes a weight of `cols` columns, of the dtype and device of `like`."""
    return jit.has_kernels(like.device) and storage.can_pack(like.dtype, cols)


def allocate(
    shape: tuple[int, int], like: torch.Tensor, ratio: float, remote: str, access: TierAccess
) -> tuple[Tiers, TieredWeight]:
    """Tiers of just the size of a weight [M, K], and that weight, of no particular values.

    It is of the dtype of `like`, for the device of `like`, and has its last rows, `ratio` of it, in
    the tier `remote`, which the GPU reads as `access` says. Raises CannotRun where this machine
    does not give the memory.
    """
    (rows, cols), count = shape, row_block_count(shape[0])
    there = remote_count(ratio, count)
    here, packed = count - there, has_kernel(like, cols)
    if packed:
        sizes = [row_blocks * row_block_bytes(cols) for row_blocks in (here, there)]
    else:
        local = first_row(here, rows)
        sizes = [aligned(n * cols * like.dtype.itemsize) for n in (local, rows - local)]
    tiers = allocate_tiers(dict(zip((LOCAL, remote), sizes, strict=True)), like.device)
    placement = ((LOCAL, here), (remote, there))
    if not packed:
        return tiers, PartitionedTensor.empty(shape, like.dtype, placement, tiers)
    accesses, sms = (TierAccess(), access), sm_count(like.device)
    return tiers, storage.allocate(shape, like.dtype, placement, accesses, tiers, sms=sms)


def remote_share(weight: TieredWeight) -> float:
    """The share of a weight's bytes that lies outside the local tier."""
    sizes = [part.data.nbytes for part in weight.parts]
    here = sum(part.data.nbytes for part in weight.parts if part.tier == LOCAL)
    return 1 - here / sum(sizes)


def fill(weight: TieredWeight, dense: torch.Tensor, device: torch.device) -> None:
    """Write `dense` [M, K], of any dtype and device, into a weight for `device`."""
    if isinstance(weight, PartitionedTensor):
        for part in weight.parts:
            part.data.copy_(dense[part.rows])
        return
    for piece in storage.pieces(weight, storage.PIECE_ELEMENTS):
        storage.write(piece, dense[piece.rows].to(device, weight.dtype))
    if device.type == "cuda":  # an overlapping launch does not wait for these copies
        torch.cuda.synchronize(device)
