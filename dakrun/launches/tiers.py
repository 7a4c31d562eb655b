"""Access of a launch's CTAs to each tier."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TierAccess:
    """Limits of reading a tier: the number of SMs, and the bytes in flight over all of them.

    None is no limit. The local tier's SMs read a `mixed` remote tier, in turn with their own row
    blocks or slots, so that no SM reads from the link only. Launches of many rows do not mix tiers:
    there the limits apply.
    """

    sms: int | None = None
    window_bytes: int | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        for name in ("sms", "window_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be None or at least 1")
