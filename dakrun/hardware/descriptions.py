"""A profile in words: where its figures come from, and how old they are."""

import datetime

from dakrun.hardware.files import shipped_profiles
from dakrun.hardware.profile import HardwareProfile


def spread_warning(profile: HardwareProfile) -> str | None:
    """A warning for a measured profile whose figures spread, for each use by `--profile auto`."""
    if not (spread := profile.provenance.spread):
        return None
    where = "" if profile.name not in shipped_profiles() else " on another machine"
    return (
        f"warning: profile {profile.name}: {spread}{where}; predictions may be off: run dakrun "
        "profile while nothing else runs here"
    )


def describe_profile(profile: HardwareProfile) -> str:
    """One line on a profile that `--profile auto` chose: device, source and age."""
    source = profile.provenance
    age = _age(source.date)
    facts = {
        "measured": f"measured {age}",
        "spec-sheet": f"not measured, from a data sheet ({age})",
        "nominal": "not measured, round numbers",
    }[source.kind]
    line = f"profile {profile.name} of {profile.device_name}: {facts}"
    if profile.name not in shipped_profiles():
        return line
    elsewhere = " on another machine" if source.kind == "measured" else ""
    return f"{line}{elsewhere}; dakrun profile measures this machine"


def _age(date: str) -> str:
    """The age of an ISO date in words; any other text unchanged."""
    try:
        days = (datetime.date.today() - datetime.date.fromisoformat(date)).days
    except ValueError:
        return date
    return "today" if days <= 0 else f"{days} day{'s' if days > 1 else ''} ago"
