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

    def stages(self, nbytes: int, most: int) -> int:
        """Stages in flight, up to `most`: those that come closest to the window, at least one.

        All CTAs together have `nbytes` in a stage. Rounded down, a stage of more than half of the
        window would be all that is in flight, and the link would wait for the latency of memory.
        """
        if self.window_bytes is None or not nbytes:
            return most
        return max(1, min(most, round(self.window_bytes / nbytes)))
