"""What all sweeps of `dakrun bench` are asked: remote shares, the tier that holds them, a dtype.

Knows how users write them; needs no GPU and no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dakrun.errors import UsageError
from dakrun.hardware.profile import HardwareProfile, RemoteTier
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

    def remote_tiers(self, profile: HardwareProfile) -> list[RemoteTier]:
        """The remote tier in `profile`, or none where every share is 0.

        Raises UsageError where the profile has no such tier, or is of no GPU.
        """
        if profile.device != "cuda":
            raise UsageError(
                f"profile {profile.name} is of a CPU", hint="name that of a GPU, or --profile auto"
            )
        if not any(self.ratios):
            return []
        return [profile.tier(name) for name in Policy(remote=(self.remote,)).remote_tiers(profile)]


def parse_ratios(texts: Iterable[str]) -> tuple[Ratio, ...]:
    """The remote shares in some texts, each once; UsageError where one is malformed."""
    return tuple(dict.fromkeys(map(parse_ratio, texts)))


def parse_ratio(text: str) -> Ratio:
    """The remote share in a text such as "0.1" or "turning-point"; UsageError for anything else."""
    return TURNING_POINT if text == TURNING_POINT else parse_share(text, TURNING_POINT)


def parse_share(text: str, word: str) -> float:
    """The number from 0 to 1 in a text; else a UsageError, which says that `word` is one, too."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(
            f"{text!r} is not a remote share",
            hint=f"write a number from 0 to 1, or {word}, as in --ratio 0.1",
        )
    return share
