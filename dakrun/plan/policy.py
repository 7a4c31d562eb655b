"""Policy: the parts of a plan that the user fixes, and the names of strategies and transports."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dakrun.errors import UsageError, check_choice, check_number, invalid_value
from dakrun.hardware import HardwareProfile

Strategy = Literal["auto", "greedy", "uniform"]
Transport = Literal["direct", "staged"]

DEFAULT_REMOTE = ("host",)


def parse_remote(text: str) -> tuple[str, ...]:
    """The remote tiers in a text such as "host,peer"."""
    return tuple(tier.strip() for tier in text.split(","))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The user's choices; None leaves a choice to the planner.

    Budgets are bytes per tier, `peer_budget` for each peer. By default they are the profile's
    capacities in make_plan, and the memory that is free in LLM.
    `offload_ratio` is the ratio of weight and KV bytes outside HBM; with `kv_offload_ratio`, the
    ratio of remote KV slots, it is that of weight bytes alone. Ratios are met to the nearest unit
    or refused. `transport` reads remote bytes in place (direct), or from HBM after the copy engine
    has copied them (staged), experts only in steps that read nearly all of them. The `strategy`
    greedy gives each op a ratio of its own, uniform gives all ops one, and auto takes what is
    predicted to be fastest. `remote` names the tiers that may be used besides HBM; by default it is
    the host, or none if the profile has no remote tiers.
    Raises UsageError for values out of range.
    """

    hbm_budget: int | None = None
    host_budget: int | None = None
    peer_budget: int | None = None
    offload_ratio: float | None = None
    kv_offload_ratio: float | None = None
    strategy: Strategy = "auto"
    transport: Transport | None = None
    remote: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        limits = dict.fromkeys(("hbm_budget", "host_budget", "peer_budget"), math.inf)
        for name in limits:
            if isinstance(text := getattr(self, name), str):
                hint = f"{name} must be a number of bytes: 20 GiB are 20 * 2**30"
                raise UsageError(f"{name} is {text!r}", hint=hint)
        for name, high in (limits | {"offload_ratio": 1, "kv_offload_ratio": 1}).items():
            value = check_number(name, getattr(self, name), 0, high, or_one_of=(None,))
            object.__setattr__(self, name, value)
        check_choice("strategy", self.strategy, get_args(Strategy))
        check_choice("transport", self.transport, (*get_args(Transport), None))
        if self.remote is None:
            return
        if not isinstance(self.remote, tuple) or not all(isinstance(n, str) for n in self.remote):
            raise invalid_value("remote", self.remote, "a tuple of tier names")
        if not self.remote or len(set(self.remote)) < len(self.remote):
            raise UsageError(
                f"remote tiers {', '.join(self.remote) or 'none'}: each must be named once",
                hint="name one or more, such as --remote host or --remote host,peer",
            )

    def remote_tiers(self, profile: HardwareProfile) -> tuple[str, ...]:
        """Names of the remote tiers in `profile`; "peer" is its first peer.

        Raises UsageError where the profile has no such tier, or a tier is named twice, or a ratio
        is to lie outside HBM and the profile has no remote tiers.
        """
        if self.remote is None and not profile.remote:
            self._check_all_local(profile)
            return ()
        peers = [tier.name for tier in profile.remote if tier.name.startswith("peer")]
        remote = self.remote or DEFAULT_REMOTE
        named = [peers[0] if name == "peer" and peers else name for name in remote]
        if len(set(named)) < len(named):
            raise UsageError(
                f"remote tiers {', '.join(remote)}: peer and {peers[0]} are the same",
                hint="name each tier once",
            )
        for name in named:
            if name.startswith("peer") and name not in peers:
                has = ", ".join(tier.name for tier in profile.remote) or "none"
                raise UsageError(
                    f"profile {profile.name} has no remote tier {name!r}",
                    hint=f"it has: {has}; dakrun profile finds the peer GPUs that this one can "
                    "read, and dakrun doctor shows them",
                )
        return tuple(profile.tier(name).name for name in named)

    def _check_all_local(self, profile: HardwareProfile) -> None:
        """Raise UsageError if a fixed ratio is above 0, for a profile without remote tiers."""
        ratios = {"offload": self.offload_ratio, "KV offload": self.kv_offload_ratio}
        for name, ratio in ratios.items():
            if ratio:
                raise UsageError(
                    f"the {name} ratio is {ratio:g}, but profile {profile.name} has no "
                    "remote tiers",
                    hint="leave the ratios at auto or 0: everything then lies in HBM",
                )

    def budget(self, tier: str, capacity: int) -> int:
        """Bytes that may be used of a remote tier with `capacity` bytes."""
        given = self.peer_budget if tier.startswith("peer") else self.host_budget
        return capacity if given is None else given
