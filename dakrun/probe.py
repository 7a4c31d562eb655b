"""Measures this machine for the planner and keeps the profile that follows.

How a CPU is measured is in probe_cpu.py, a GPU in probe_gpu.py.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import HardwareProfile, gpu_names, kept_profiles_dir, shipped_profiles
from dakrun.heat_map import grids, heat_map

if TYPE_CHECKING:
    from dakrun.measurement import Measurement

COLUMNS = ("what", "median", "spread", "runs", "")
LEGEND = (
    "spread: distance of the quartiles over the median; efficiency: the least time that the other "
    "figures allow, over the measured time"
)


@dataclass(frozen=True)
class Probe:
    """A measured profile and the measurements that it was made of."""

    profile: HardwareProfile
    measurements: "tuple[Measurement, ...]"


def target(output: str | None, name: str | None, device: Literal["cuda", "cpu"]) -> Path:
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


def default_name(device: Literal["cuda", "cpu"]) -> str:
    """What a profile of this machine's `device` is called, as in measured-nvidia-h200."""
    what = next(iter(gpu_names()), "gpu") if device == "cuda" else "cpu"
    return "measured-" + re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")


def measured_device(device: Literal["auto", "cuda", "cpu"]) -> Literal["cuda", "cpu"]:
    """The device that `device` means here; CannotRun where it is a GPU and there is none."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise CannotRun(
            "no CUDA GPU can be used here", hint="use --device cpu, or see: dakrun doctor"
        )
    return "cuda"


def measure(name: str, device: Literal["cuda", "cpu"], *, quick: bool = False) -> Probe:
    """Measure `device` for a profile called `name`; `quick` uses smaller buffers and fewer runs."""
    if device == "cpu":
        from dakrun import probe_cpu

        return Probe(*probe_cpu.measure_cpu(name, probe_cpu.QUICK if quick else probe_cpu.FULL))
    from dakrun import gpu_sweeps, probe_gpu

    return Probe(*probe_gpu.measure_gpu(name, gpu_sweeps.QUICK if quick else gpu_sweeps.FULL))


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


def render(probe: Probe, console: Console) -> None:
    """Print a row for every measurement, then the heat maps; nothing depends on colour."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in COLUMNS:
        table.add_column(title, justify="left" if title in ("what", "") else "right")
    for row in rows(probe):
        table.add_row(*map(Text, row))
    console.print(table, highlight=False)
    console.print(LEGEND, soft_wrap=True, highlight=False)
    for grid in grids(probe.profile):
        lines = heat_map(grid, width=min(100, console.width), ascii_only=console.options.ascii_only)
        console.print("", *lines, sep="\n", soft_wrap=True, highlight=False, markup=False)


def rows(probe: Probe) -> list[tuple[str, ...]]:
    """One row of text per measurement, under COLUMNS."""
    return [
        (m.what, m.text, f"{m.spread:.1%}", str(m.runs), "" if m.steady else "unsteady")
        for m in probe.measurements
    ]
