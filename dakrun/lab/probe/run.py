"""From the options of `dakrun profile` and `--profile auto` to a measured, saved profile.

Knows names, files and devices; cpu.py and gpu.py measure. torch is imported when it is needed.
"""

import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dakrun.errors import CannotRun, UsageError, check_new_file
from dakrun.hardware import (
    ESTIMATED,
    HardwareProfile,
    cpu_name,
    find_profile,
    kept_profile,
    kept_profiles_dir,
    save_profile,
    shipped_profiles,
)

if TYPE_CHECKING:
    from dakrun.lab.samples import Measurement

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Probe:
    """A measured profile and its measurements."""

    profile: HardwareProfile
    measurements: "tuple[Measurement, ...]"

    @property
    def unsteadiness(self) -> tuple[int, float]:
        """The number of figures that spread, and the widest spread."""
        spreads = [m.spread for m in self.measurements]
        return sum(not m.steady for m in self.measurements), max(spreads, default=0.0)


def measured_device(device: Literal["auto", "cuda", "cpu"]) -> Device:
    """The device to measure; CannotRun for a GPU if there is none."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise CannotRun(
            "no CUDA GPU is available here", hint="use --device cpu, or see: dakrun doctor"
        )
    return "cuda"


def device_name(device: Device) -> str:
    """Name of torch's current GPU, with limits if it is held to any, or of this CPU.

    Kept profiles are found by it.
    """
    if device == "cpu":
        return cpu_name()

    from dakrun.kernels.runtime import gpu_name

    return gpu_name()


def target(output: str | None, name: str | None, device: Device) -> Path:
    """The file of a profile called `name`: `output`, or else one in the cache folder.

    Without a name, the profile is called like the file or the device, such as
    measured-nvidia-h200. Raises UsageError, before anything is measured, if the profile could not
    be saved there or found again.
    """
    stem = name
    if stem is None:
        measured = device_name(device) if device == "cuda" else "cpu"
        stem = "measured-" + re.sub(r"[^a-z0-9]+", "-", measured.lower()).strip("-")
        stem = Path(output).stem if output else stem
    if not re.fullmatch(r"\w[\w.-]*", stem):
        raise UsageError(f"a profile cannot be called {stem!r}", hint="use letters, digits and -")
    if output is None:
        if stem in shipped_profiles():
            raise UsageError(
                f"a shipped profile is called {stem!r}", hint="choose another --name, or use -o"
            )
        return kept_profiles_dir() / f"{stem}.toml"
    path = Path(output)
    check_new_file(path, (".toml",), "a profile is a .toml file", option="-o")
    return path


def duration(*, quick: bool) -> str:
    """The time that measuring takes, in words."""
    return "some seconds" if quick else "about a minute, or more with peer GPUs"


def measure(
    name: str,
    device: Device,
    *,
    quick: bool = False,
    kinds: Set[str] = ESTIMATED,
    note: Callable[[str], None] = lambda _: None,
) -> Probe:
    """Measure `device` for a profile called `name`; `quick` has smaller buffers and fewer runs.

    Of a GPU's kinds of costs in ESTIMATED only `kinds` are measured. If figures spread, all is
    measured once more, which `note` reports, and the steadier probe is returned.
    """

    def once() -> Probe:
        if device == "cpu":
            from dakrun.lab.probe import cpu

            return Probe(*cpu.measure_cpu(name, cpu.QUICK if quick else cpu.FULL))
        from dakrun.lab.probe import effort, gpu

        return Probe(*gpu.measure_gpu(name, effort.QUICK if quick else effort.FULL, kinds))

    return _steadier(once, note)


def measure_more(
    profile: HardwareProfile, kinds: Set[str], *, note: Callable[[str], None] = lambda _: None
) -> Probe:
    """`profile`, measured on torch's current GPU, with costs of more `kinds`, measured quickly."""

    def once() -> Probe:
        from dakrun.lab.probe import effort, gpu

        return Probe(*gpu.measure_more(profile, effort.QUICK, kinds))

    return _steadier(once, note)


def _steadier(once: Callable[[], Probe], note: Callable[[str], None]) -> Probe:
    """The result of `once`; if figures spread, the steadier of two results."""
    first = once()
    if not first.unsteadiness[0]:
        return first
    note(f"{first.profile.provenance.spread}: measuring once more")
    return min(first, once(), key=lambda p: p.unsteadiness)


def kept_or_measured(
    device: Device, kinds: Set[str], progress: Callable[[str], None]
) -> HardwareProfile:
    """The profile that `--profile auto` means for a run on `device`.

    `kinds` are the kinds of costs that the run's models need (plan.cost_kinds). The profile is the
    kept one if there is one; if that was measured on this machine, costs of `kinds` that it lacks
    are measured and added to it. A CPU, or a GPU that cannot be measured, gets a shipped profile.
    Any other GPU is measured, quickly and once. `progress` reports what is measured. Raises
    CannotRun if the GPU can neither be measured nor has a shipped profile.
    """
    name = device_name(device)
    kept = kept_profile(device=device, name=name)
    if device == "cpu":
        return kept or find_profile(device=device, name=name)
    path = target(None, None, device)
    if kept is not None:
        lacking = frozenset(kind for kind in kinds if not kept.measures(kind))
        # A profile of another name, or not measured, is the user's: its costs are estimated.
        own = kept.name == path.stem and kept.provenance.kind == "measured"
        return _completed(kept, lacking, path, progress) if lacking and own else kept
    progress(f"no profile of this {name} yet: measuring it, once, for {duration(quick=True)}")
    try:
        profile = measure(path.stem, device, quick=True, kinds=kinds, note=progress).profile
    except CannotRun as problem:
        try:
            shipped = find_profile(device=device, name=name)
        except UsageError:
            raise problem from None
        progress(f"not measured: {problem}")
        return shipped
    return _saved(profile, path, progress)


def _completed(
    kept: HardwareProfile, kinds: Set[str], path: Path, progress: Callable[[str], None]
) -> HardwareProfile:
    """`kept` with costs of `kinds` added, saved in `path`; `kept` if they cannot be measured."""
    names = " and ".join(sorted(kinds))
    progress(
        f"profile {kept.name} has no costs of {names} yet: measuring them, once, for "
        f"{duration(quick=True)}"
    )
    try:
        profile = measure_more(kept, kinds, note=progress).profile
    except CannotRun as problem:
        progress(f"not measured: {problem}")
        return kept
    return _saved(profile, path, progress)


def _saved(
    profile: HardwareProfile, path: Path, progress: Callable[[str], None]
) -> HardwareProfile:
    """`profile`, saved in `path` if possible."""
    try:
        save_profile(profile, path)
        progress(f"saved as {path}; dakrun profile measures it more thoroughly")
    except UsageError as problem:
        progress(f"not saved: {problem}")
    return profile
