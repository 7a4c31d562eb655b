"""The weight of one matrix in two tiers: where its rows lie, its memory, how it is written.

Packed for SplitK_GEMM where that can be, else row by row. Knows tensors and tiers, no modules.
"""

from dataclasses import replace

import torch

from dakrun.hardware import LOCAL
from dakrun.kernels.heuristics import TierAccess, split_octets
from dakrun.kernels.packing import CHUNK, DTYPES, PackedPart, PackedTensor, octet_bytes, pack
from dakrun.memory import PartitionedTensor, Tiers, aligned, allocate_tiers
from dakrun.nn.remote_tier import remote_count, sm_count
from dakrun.octets import OCTET_ROWS, first_row, octet_count

TieredWeight = PackedTensor | PartitionedTensor


def has_kernel(like: torch.Tensor, cols: int) -> bool:
    """Whether SplitK_GEMM takes a weight of `cols` columns, of the dtype and device of `like`."""
    return like.is_cuda and like.dtype in DTYPES and cols % CHUNK == 0


def allocate(
    shape: tuple[int, int], like: torch.Tensor, ratio: float, remote: str, access: TierAccess
) -> tuple[Tiers, TieredWeight]:
    """Tiers of just the size of a weight [M, K], and that weight, of no particular values.

    It is of the dtype of `like`, for the device of `like`, and has its last rows, `ratio` of it, in
    the tier `remote`, which the GPU reads as `access` says. Raises CannotRun where this machine
    does not give the memory.
    """
    there = remote_count(ratio, octet_count(shape[0]))
    octets = (octet_count(shape[0]) - there, there)
    if has_kernel(like, shape[1]):
        return _packed(shape, like, octets, remote, access)
    return _partitioned(shape, like, octets, remote)


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
    row = 0
    for packed in weight.parts:
        split, at = packed.split, 0
        while split.octets:  # wave after wave, as they lie: packing takes memory, too
            wave = replace(split, octets=min(split.wave, split.octets))
            rows = dense[row : row + OCTET_ROWS * wave.octets]
            data = pack(rows.to(device, weight.dtype).contiguous(), wave)
            packed.data[at : at + len(data)].copy_(data)
            split = replace(split, octets=split.octets - wave.octets)
            row, at = row + len(rows), at + len(data)
    if device.type == "cuda":  # an overlapping launch does not wait for these copies
        torch.cuda.synchronize(device)


def _packed(
    shape: tuple[int, int],
    like: torch.Tensor,
    octets: tuple[int, int],
    remote: str,
    access: TierAccess,
) -> tuple[Tiers, PackedTensor]:
    """Tiers of just the size of a packed weight, and that weight."""
    splits = split_octets(octets, (TierAccess(), access), sms=sm_count(like.device))
    sizes = [split.octets * octet_bytes(shape[1]) for split in splits]
    tiers = allocate_tiers(dict(zip((LOCAL, remote), sizes, strict=True)), like.device)
    parts = [
        PackedPart(tier.name, split, tier.allocate((size,), torch.uint8))
        for tier, split, size in zip(tiers.values(), splits, sizes, strict=True)
    ]
    return tiers, PackedTensor(shape, like.dtype, tuple(parts))


def _partitioned(
    shape: tuple[int, int], like: torch.Tensor, octets: tuple[int, int], remote: str
) -> tuple[Tiers, PartitionedTensor]:
    """Tiers of just the size of a weight whose rows lie as they are, and that weight."""
    (rows, cols), (here, there) = shape, octets
    local = first_row(here, rows)
    row_bytes = cols * like.dtype.itemsize
    sizes = {LOCAL: aligned(local * row_bytes), remote: aligned((rows - local) * row_bytes)}
    tiers = allocate_tiers(sizes, like.device)
    placement = ((LOCAL, here), (remote, there))
    return tiers, PartitionedTensor.empty(shape, like.dtype, placement, tiers)
