"""What all sweeps of `dakrun bench` are asked: remote shares, the tier that holds them, a dtype.

Knows how users write them; needs no GPU and no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dakrun.errors import UsageError
from dakrun.hardware import HardwareProfile, RemoteTier
from dakrun.plan.policy import Policy

TURNING_POINT: Literal["turning-point"] = "turning-point"

Ratio = float | Literal["turning-point"]
BenchDtype = Literal["float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every case of a kernel with each of the remote shares `ratios`.

    `remote` is the tier that holds the share, as a profile names it.
    """

    ratios: tuple[Ratio, ...]
    remote: str
    dtype: BenchDtype

    def remote_tier(self, profile: HardwareProfile) -> RemoteTier | None:
        """The remote tier in `profile`; None where every share is 0.

        Raises UsageError where the profile has no such tier, or is of no GPU.
        """
        if profile.device != "cuda":
            raise UsageError(
                f"profile {profile.name} is of a CPU", hint="name that of a GPU, or --profile auto"
            )
        if not any(self.ratios):
            return None
        (name,) = Policy(remote=(self.remote,)).remote_tiers(profile)
        return profile.tier(name)


def parse_ratios(texts: Iterable[str]) -> tuple[Ratio, ...]:
    """The remote shares in some texts, each once; UsageError where one is malformed."""
    return tuple(dict.fromkeys(map(parse_ratio, texts)))


def parse_ratio(text: str) -> Ratio:
    """The remote share in a text such as "0.1" or "turning-point"; UsageError for anything else."""
    if text == TURNING_POINT:
        return TURNING_POINT
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise UsageError(
            f"{text!r} is not a remote share",
            hint=f"write a number from 0 to 1, or {TURNING_POINT}, as in --ratio 0.1",
        )
    return ratio
