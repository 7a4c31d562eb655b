"""What the link to a remote tier needs in flight, and whether more of it would do harm.

Knows a tier's figures and the rings of a GPU's CTAs.
"""

from dakrun.geometry import SHARED_BYTES_PAIRED
from dakrun.hardware import RemoteTier

LINK_SECONDS = 2.3e-6  # a link's rate for so long must be in flight: a peer on NVLink 4


def is_windowed(tier: RemoteTier) -> bool:
    """Whether the window of `tier` is less than the rings of all its SMs hold."""
    return tier.window_bytes < tier.sms * SHARED_BYTES_PAIRED


def bytes_needed(tier: RemoteTier) -> float:
    """Bytes in flight that a link needs: its window, where it has one."""
    return tier.window_bytes if is_windowed(tier) else tier.direct_bytes_per_s * LINK_SECONDS
