"""Profile files: shipped with dakrun or kept in the cache, and the best one for this machine.

Knows folders and device names; profile_toml.py knows the content.
"""

import contextlib
import os
import platform
from pathlib import Path
from typing import Literal

from dakrun.errors import UsageError, check_file_name
from dakrun.hardware.parts import OtherSchema
from dakrun.hardware.profile import HardwareProfile
from dakrun.hardware.profile_toml import parse_profile, profile_text
from dakrun.resources import cache_dir, resource_dir


def load_profile(name: str) -> HardwareProfile:
    """The profile in the .toml file `name`, or the shipped or kept one of that name.

    Raises UsageError where there is none, or it breaks the schema.
    """
    check_file_name(name)
    folders = (resource_dir("profiles"), kept_profiles_dir())
    paths = [Path(name)] if name.endswith(".toml") else [f / f"{name}.toml" for f in folders]
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        return parse_profile(text, source=str(path))
    known = ", ".join(shipped_profiles())
    raise UsageError(f"no profile {name!r}", hint=f"give a .toml file or one of: {known}")


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with dakrun."""
    return sorted(path.stem for path in resource_dir("profiles").glob("*.toml"))


def kept_profiles_dir() -> Path:
    """The folder in which `dakrun profile` keeps profiles of this machine."""
    return cache_dir() / "profiles"


def find_profile(*, device: Literal["cuda", "cpu"], name: str | None = None) -> HardwareProfile:
    """The best profile for this machine's CPU, or for its GPU called `name`.

    The default name is the first GPU that the driver lists in /proc, which needs no CUDA library.
    A kept profile of the same device comes before shipped ones. Shipped ones are ordered by the
    longest matching device name, then measured before spec sheet, then the fewest remote tiers.
    Raises UsageError where the GPU has no profile.
    """
    name = _device_name(device) if name is None else name
    kept = kept_profile(device=device, name=name)
    if kept is not None:
        return kept
    if device == "cpu":
        return load_profile("cpu")
    shipped = [load_profile(profile) for profile in shipped_profiles()]
    fitting = [p for p in shipped if p.device == device and name and p.device_name in name]
    if fitting:
        return min(fitting, key=_preference)
    raise UsageError(
        f"no profile for {name or 'a GPU (there is none here)'}",
        hint="run dakrun profile, or name one with --profile: " + ", ".join(shipped_profiles()),
    )


def kept_profile(*, device: Literal["cuda", "cpu"], name: str) -> HardwareProfile | None:
    """The newest profile that `dakrun profile` kept of the device called `name`, or None.

    Profiles of another schema version are skipped. Raises UsageError for a damaged one.
    """
    files = sorted(kept_profiles_dir().glob("*.toml"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(files):
        try:
            kept = load_profile(str(path))
        except OtherSchema:
            continue
        except UsageError as problem:
            raise UsageError(str(problem), hint="run dakrun profile again") from None
        if kept.device == device and name and kept.device_name == name:
            return kept
    return None


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Write `profile` to `path` atomically; the cache folder is made if needed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.parent == kept_profiles_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(profile_text(profile), encoding="utf-8")
        partial.replace(path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UsageError(
            f"{path}: {problem.strerror}", hint="name a writable file with -o"
        ) from None


def _device_name(device: Literal["cuda", "cpu"]) -> str:
    return cpu_name() if device == "cpu" else next(iter(gpu_names()), "")


def _preference(profile: HardwareProfile) -> tuple[int, bool, int, str]:
    measured = profile.provenance.kind == "measured"
    return -len(profile.device_name), not measured, len(profile.remote), profile.name


def cpu_name() -> str:
    """Model of this machine's CPU and the cores that this process may use of it."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def gpu_names() -> list[str]:
    """Model names of the NVIDIA GPUs that the driver lists, in its order."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                names.append(line.removeprefix("Model:").strip())
    return names
