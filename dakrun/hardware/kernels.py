"""Whether dakrun's kernels run on the card of a profile, and if not, why."""

from dakrun.hardware.card import MIN_SHARED_BYTES
from dakrun.hardware.profile import HardwareProfile


def why_no_kernels(profile: HardwareProfile) -> str | None:
    """A sentence for plans of a card that the kernels do not run on, or may not; else None.

    Plans assume kernels. A CPU has none, and its profile's costs are not those of kernels.
    """
    if profile.device != "cuda":
        return None
    card, needed = profile.card, f"{MIN_SHARED_BYTES >> 10} KiB of shared memory a block"
    if not {"compute_capability", "shared_bytes_per_sm"} <= profile.facts.keys():
        return (
            f"profile {profile.name} has no compute_capability or shared_bytes_per_sm under "
            f"[facts], so that its card may lack what dakrun's kernels need ({needed}): generate "
            "would then run plain torch, slower than predicted"
        )
    if card.runs_kernels:
        return None
    lacks = f"they need {needed}, it has {card.shared_bytes >> 10} KiB"
    if card.shared_bytes >= MIN_SHARED_BYTES:
        lacks = f"they are not built for compute capability {card.capability}"
    return (
        f"dakrun's kernels do not run on {profile.device_name} ({lacks}): generate runs plain "
        "torch there, slower than predicted"
    )
