"""Measures this machine for the planner, keeps the profile that follows, and finds it again.

How a CPU is measured is in cpu.py, a GPU in gpu.py; what is shown of it in table.py and plot.py.
"""

import contextlib
import datetime
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dakrun.errors import CannotRun, UsageError
from dakrun.hardware.files import (
    cpu_name,
    find_profile,
    kept_profile,
    kept_profiles_dir,
    shipped_profiles,
)
from dakrun.hardware.profile import HardwareProfile

if TYPE_CHECKING:
    from dakrun.probe.measurement import Measurement

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Probe:
    """A measured profile and the measurements that it was made of."""

    profile: HardwareProfile
    measurements: "tuple[Measurement, ...]"


def measured_device(device: Literal["auto", "cuda", "cpu"]) -> Device:
    """The device that `device` means here; CannotRun where it is a GPU and there is none."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise CannotRun(
            "no CUDA GPU can be used here", hint="use --device cpu, or see: dakrun doctor"
        )
    return "cuda"


def device_name(device: Device) -> str:
    """Name of torch's current GPU, or of this CPU: what a kept profile is found by."""
    if device == "cpu":
        return cpu_name()
    import torch

    return torch.cuda.get_device_name()


def default_name(device: Device) -> str:
    """What a profile of this machine's `device` is called, as in measured-nvidia-h200."""
    what = device_name(device) if device == "cuda" else "cpu"
    return "measured-" + re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")


def target(output: str | None, name: str | None, device: Device) -> Path:
    """The file for a profile called `name`: `output`, or one in the cache folder.

    Without a name it is called after the file, or after what is measured.

    Raises UsageError, before anything is measured, where the profile could not be kept or found.
    """
    stem = name
    if stem is None:
        stem = Path(output).stem if output else default_name(device)
    if not re.fullmatch(r"\w[\w.-]*", stem):
        raise UsageError(f"a profile cannot be called {stem!r}", hint="use letters, digits and -")
    if output is None:
        if stem in shipped_profiles():
            raise UsageError(
                f"a shipped profile is called {stem!r}", hint="choose another --name, or use -o"
            )
        return kept_profiles_dir() / f"{stem}.toml"
    path = Path(output)
    if path.suffix != ".toml":
        raise UsageError(f"{output}: a profile is a .toml file", hint=f"write -o {path.stem}.toml")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{output}: no such folder", hint="make it, or change -o")
    return path


def duration(*, quick: bool) -> str:
    """How long measuring takes, in words."""
    return "some seconds" if quick else "about a minute, or more with peer GPUs"


def measure(name: str, device: Device, *, quick: bool = False) -> Probe:
    """Measure `device` for a profile called `name`; `quick` uses smaller buffers and fewer runs."""
    if device == "cpu":
        from dakrun.probe import cpu

        return Probe(*cpu.measure_cpu(name, cpu.QUICK if quick else cpu.FULL))
    from dakrun.probe import effort, gpu

    return Probe(*gpu.measure_gpu(name, effort.QUICK if quick else effort.FULL))


def save(profile: HardwareProfile, path: Path) -> None:
    """Write `profile` to `path`, whole or not at all; the cache folder is made where needed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.parent == kept_profiles_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(profile.to_toml(), encoding="utf-8")
        partial.replace(path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UsageError(
            f"{path}: {problem.strerror}", hint="choose a file that can be written with -o"
        ) from None


def kept_or_measured(device: Device, note: Callable[[str], None]) -> HardwareProfile:
    """What `--profile auto` means for a run on `device`.

    A GPU without a kept profile is measured, quickly and once, which is told to `note`; one that
    cannot be measured, or a CPU, takes a shipped profile.
    Raises CannotRun where the GPU can neither be measured nor has a shipped profile.
    """
    name = device_name(device)
    if (kept := kept_profile(device=device, name=name)) is not None:
        return kept
    if device == "cpu":
        return find_profile(device=device, name=name)
    path = target(None, None, device)
    note(f"no profile of this {name} is kept: measuring it, once, for {duration(quick=True)}")
    try:
        profile = measure(path.stem, device, quick=True).profile
    except CannotRun as problem:
        try:
            shipped = find_profile(device=device, name=name)
        except UsageError:
            raise problem from None
        note(f"not measured: {problem}")
        return shipped
    try:
        save(profile, path)
        note(f"kept as {path}; dakrun profile measures more closely")
    except UsageError as problem:
        note(f"not kept: {problem}")
    return profile


def describe_profile(profile: HardwareProfile) -> str:
    """Which profile `--profile auto` took, of what, from where and how old, in a line."""
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
    """How long ago an ISO date was; what is no date as it stands."""
    try:
        days = (datetime.date.today() - datetime.date.fromisoformat(date)).days
    except ValueError:
        return date
    return "today" if days <= 0 else f"{days} day{'s' if days > 1 else ''} ago"
