"""The remote tier of a module: what may be asked of it, and how a GPU reads it."""

import math
import re

import torch

from dakrun.hardware import HardwareProfile, find_profile, load_profile
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.plan import is_windowed


def check_remote(ratio: float, remote: str) -> None:
    """ValueError unless `ratio` is a share and `remote` the name of a remote tier."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"expected a ratio from 0 to 1, got {ratio}")
    if not re.fullmatch(r"host|peer:\d+", remote):
        raise ValueError(f"expected host or peer:N as the remote tier, got {remote!r}")


def remote_count(ratio: float, count: int) -> int:
    """How many of `count` units lie in the remote tier: the share `ratio`, rounded."""
    return math.floor(ratio * count + 0.5)


def profiled_access(
    profile: HardwareProfile | str | None, remote: str, device: torch.device, ratio: float
) -> TierAccess:
    """How a profile has the tier `remote` be read, with the share `ratio` of an operand in it.

    Where its link needs no window, and brings that share in the time in which HBM gives the rest,
    no SM reads it alone.

    The profile may be given by name or file; None is the one that `dakrun profile` kept of the GPU
    `device`, else a shipped one. Raises UsageError where there is none, or none with that tier.
    """
    if profile is None:
        profile = find_profile(device="cuda", name=torch.cuda.get_device_name(device))
    elif isinstance(profile, str):
        profile = load_profile(profile)
    tier = profile.tier(remote)
    both = tier.direct_bytes_per_s + profile.hbm_bytes_per_s
    mixed = not is_windowed(tier) and ratio <= tier.direct_bytes_per_s / both
    return TierAccess(tier.sms, tier.window_bytes, mixed=mixed)
