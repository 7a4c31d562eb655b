"""The tiers of a module's operands: how a GPU reads the remote tier, and weights in two tiers.

Weights are packed for the kernels if these support them, else stored row by row. Knows tensors and
tiers, no modules.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dakrun.formats import Quantised, QuantisedRows, Rows, Stored, WeightFormat
from dakrun.formats.stored import SCALES
from dakrun.geometry import row_block_count
from dakrun.hardware import LOCAL, HardwareProfile, find_profile, load_profile
from dakrun.kernels.runtime import DTYPES, card_of, described_card, gpu_name, has_kernels
from dakrun.launches import TierAccess, split_row_blocks
from dakrun.memory.matrix import PIECE_ELEMENTS, TieredMatrix, allocated_bytes
from dakrun.memory.tiers import Tiers, allocate_tiers
from dakrun.plan import is_windowed


class _LikeATensor:
    """What other modules read of nn.Linear's weight, beside its shape and dtype.

    torch takes it for a tensor of another library, so that its fast paths, which read the memory
    of weights, are not taken; functions of torch that are given it raise TypeError.
    """

    device: torch.device
    requires_grad = False

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


@dataclass(frozen=True)
class TieredWeight(TieredMatrix, _LikeATensor):
    """A matrix in tiers with which `device` computes."""

    device: torch.device


def check_remote(ratio: float, remote: str) -> None:
    """Raise ValueError unless `ratio` is from 0 to 1 and `remote` names a remote tier."""
    if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(f"expected a ratio from 0 to 1, got {ratio!r}")
    if not re.fullmatch(r"host|peer:\d+", remote):
        raise ValueError(f"expected host or peer:N as the remote tier, got {remote!r}")


def remote_count(ratio: float, count: int) -> int:
    """The number of `count` units in the remote tier: `ratio` of them, rounded."""
    return math.floor(ratio * count + 0.5)


def profiled_access(
    profile: HardwareProfile | str | None, remote: str, device: torch.device, ratio: float
) -> TierAccess:
    """The SMs and window with which a GPU reads `remote`, which holds `ratio` of an operand.

    All SMs read it among their local row blocks if its link needs no window and delivers its part
    while HBM delivers the rest. Else some SMs read nothing but the remote tier.

    The profile may be given by name or file; None is the one that `dakrun profile` saved for the
    GPU `device`, or a shipped one. Raises UsageError if there is none, or if it lacks the tier.
    """
    if profile is None:
        profile = find_profile(device="cuda", name=gpu_name(device))
    elif isinstance(profile, str):
        profile = load_profile(profile)
    if device.type == "cuda":
        profile = profile.on(described_card(device))
    tier = profile.tier(remote)
    total = tier.direct_bytes_per_s + profile.hbm_bytes_per_s
    mixed = not is_windowed(tier, profile.card) and ratio <= tier.direct_bytes_per_s / total
    return TierAccess(tier.sms, tier.window_bytes, mixed=mixed)


def plain_format(like: torch.Tensor, layout: Quantised | None) -> WeightFormat:
    """The format of plain torch for elements of `layout`, or of the dtype of `like`."""
    return QuantisedRows(layout) if layout else Rows(like.dtype.itemsize)


def kernel_format(
    like: torch.Tensor, cols: int, layout: Quantised | None = None
) -> WeightFormat | None:
    """The format of a weight of `cols` columns that kernels read, if any.

    They support the dtype and the device of `like`. Elements are those of `layout`, if given.
    """
    packed = plain_format(like, layout).packed
    fits = like.dtype in DTYPES and packed is not None and packed.takes(cols)
    fits = fits and has_kernels(like.device)
    return packed if fits else None


def allocate(
    shape: tuple[int, int],
    like: torch.Tensor,
    ratio: float,
    remote: str,
    access: TierAccess,
    layout: Quantised | None = None,
    *,
    in_torch: bool = False,
) -> tuple[Tiers, TieredWeight]:
    """Tiers with memory for a weight [M, K], and that weight, uninitialized.

    It has the dtype of `like`, or the elements of `layout`, and computes on its device. The last
    row blocks, `ratio` of them, lie in the tier `remote`, which the GPU reads as `access` says.
    Kernels read it if they can, unless it is for plain torch alone (`in_torch`). Raises CannotRun
    if memory is short.
    """
    count, names = row_block_count(shape[0]), (LOCAL, remote)
    remote_blocks = remote_count(ratio, count)
    counts = (count - remote_blocks, remote_blocks)
    packed = None if in_torch else kernel_format(like, shape[1], layout)
    stored = packed or plain_format(like, layout)
    splits = None
    if packed:
        splits = split_row_blocks(
            counts, (TierAccess(), access), card=card_of(like.device), atom_bytes=packed.atom_bytes
        )
    sizes = allocated_bytes(stored, shape, counts)
    tiers = allocate_tiers(dict(zip(names, sizes, strict=True)), like.device)
    placement = [*zip(names, counts, strict=True)]
    found = TieredMatrix.empty(shape, like.dtype, stored, placement, tiers, splits)
    return tiers, TieredWeight(shape, like.dtype, found.parts, like.device)


def remote_ratio(weight: TieredWeight) -> float:
    """Remote bytes of a weight over all its bytes."""
    sizes = [part.nbytes for part in weight.parts]
    local = sum(part.nbytes for part in weight.parts if part.tier == LOCAL)
    return 1 - local / sum(sizes)


def with_scale_dtype(stored: Stored, tensors: Mapping[str, torch.Tensor], *shape: int) -> Stored:
    """`stored` with the dtype of the scales among the `tensors` of a weight of `shape`, by suffix.

    Raises ValueError for a tensor that is missing or of another shape.
    """
    for part in stored.parts(*shape):  # type: ignore[call-arg]
        found = tensors.get(part.suffix)
        if found is None and not part.optional:
            raise ValueError(f"expected a tensor {part.suffix} of {stored.name}, got none")
        if found is not None:
            if [n for n in found.shape if n > 1] != [n for n in part.shape if n > 1]:
                raise ValueError(
                    f"expected {part.suffix} as {list(part.shape)}, got {list(found.shape)}"
                )
            if part.dtypes == SCALES:
                stored = replace(stored, scale_dtype=str(found.dtype).removeprefix("torch."))
    return stored


def fill_quantized(
    weight: TieredWeight,
    stored: Stored,
    layout: Quantised,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Write the tensors of a quantized weight [M, K], by suffix, into a weight for `device`."""
    parts = stored.parts(*weight.shape)
    for piece in weight.pieces(PIECE_ELEMENTS):
        needed = []
        for part in parts:
            tensor = tensors.get(part.suffix, torch.empty(0, dtype=torch.int32))
            if part.suffix in tensors:
                tensor = tensor.reshape(part.shape)
            rows = part.needed(piece.rows)
            needed.append((tensor if rows is None else tensor[rows]).to(device))
        piece.write(*stored.decode(needed, piece.rows, weight.shape[1], layout))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fill(weight: TieredWeight, dense: torch.Tensor, device: torch.device) -> None:
    """Write `dense` [M, K], of any dtype and device, into a weight for `device`."""
    for piece in weight.pieces(PIECE_ELEMENTS):
        piece.write(dense[piece.rows].to(device, weight.dtype))
    if device.type == "cuda":  # a launch with PDL does not wait for these copies
        torch.cuda.synchronize(device)
