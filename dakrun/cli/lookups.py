"""Models and profiles that options name, and notes about them."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from dakrun.cli.console import eprint
from dakrun.units import format_bytes

if TYPE_CHECKING:
    from dakrun.config import ModelConfig
    from dakrun.hardware import HardwareProfile
    from dakrun.plan import Policy


def resolve_model(name: str, dtype: Any, format: str = "auto") -> "ModelConfig":
    """The architecture that --model and --dtype name, its weights in --format."""
    from dakrun.models import model_config
    from dakrun.models.hub import in_format

    model = model_config(name)
    return in_format(model if dtype == "auto" else model.with_dtype(dtype), format)


def resolve_profile(name: str) -> "HardwareProfile":
    """The profile that --profile names; auto is that of this machine's GPU, or else of its CPU."""
    from dakrun.hardware import find_profile, gpu_names, load_profile

    if name != "auto":
        return load_profile(name)
    return _warned(find_profile(device="cuda" if gpu_names() else "cpu"), eprint)


def note_no_kernels(profile: "HardwareProfile") -> None:
    """Say on stderr if the kernels that plans assume do not run on the profile's card."""
    from dakrun.hardware import why_no_kernels

    if (why := why_no_kernels(profile)) is not None:
        eprint(f"note: {why}")


def note_larger_budgets(policy: "Policy", profile: "HardwareProfile") -> None:
    """Say on stderr which budgets are larger than the memory of the profile's machine."""
    peers = [tier for tier in profile.remote if tier.name.startswith("peer")]
    hosts = [tier for tier in profile.remote if tier not in peers]
    for option, budget, tiers in (
        ("--hbm-budget", policy.hbm_budget, [profile.hbm_capacity_bytes]),
        ("--host-budget", policy.host_budget, [tier.capacity_bytes for tier in hosts]),
        ("--peer-budget", policy.peer_budget, [tier.capacity_bytes for tier in peers]),
    ):
        if budget is not None and tiers and budget > max(tiers):
            asked, there = format_bytes(budget), format_bytes(max(tiers))
            eprint(f"note: {option} {asked} is more than the {there} of profile {profile.name}")


def resolve_run_profile(
    name: str,
    device: Literal["auto", "cuda", "cpu"],
    models: Iterable["ModelConfig"],
    note: Callable[[str], None],
) -> "HardwareProfile":
    """The profile that --profile names, for a run of `models` on --device.

    auto takes the GPU's profile from the cache and measures the costs that it lacks for these
    models; without a cached profile it measures the whole GPU. `note` gets messages about it.
    """
    from dakrun.hardware import load_profile
    from dakrun.lab.probe.run import kept_or_measured, measured_device
    from dakrun.plan import cost_kinds

    if name != "auto":
        return load_profile(name)
    kinds = frozenset[str]().union(*map(cost_kinds, models))
    return _warned(kept_or_measured(measured_device(device), kinds, note), note)


def _warned(profile: "HardwareProfile", note: Callable[[str], None]) -> "HardwareProfile":
    """`profile`, which auto chose; `note` gets a warning if its figures spread."""
    from dakrun.hardware import spread_warning

    if (warning := spread_warning(profile)) is not None:
        note(warning)
    return profile
