"""What `dakrun profile` shows: a row for every measurement, the machine's sizes, the heat maps.

Nothing depends on colour.
"""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from dakrun.hardware.profile import HardwareProfile
from dakrun.probe import Probe
from dakrun.probe.heat_map import grids, heat_map
from dakrun.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("what", "median", "spread", "runs", "")
SPREAD = "spread: distance of the quartiles over the median"
EFFICIENCY = (
    "efficiency: the least time that the other figures allow, over what an op takes besides its "
    "fixed cost"
)
FACTS = {
    "compute_capability": "compute capability",
    "shared_bytes_per_sm": "shared memory of an SM",
    "l2_bytes": "L2",
    "host_memory_bytes": "host memory that can be page-locked",
    "numa": "NUMA",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "torch": "torch",
    "cuda": "CUDA",
}


def render(probe: Probe, console: "Console") -> None:
    """Print `probe` as tables, legends and heat maps that fit the console's width."""
    _print_table(console, COLUMNS, rows(probe))
    about = [SPREAD, *([EFFICIENCY] if any(not m.unit for m in probe.measurements) else [])]
    console.print("; ".join(about), highlight=False)
    console.print()
    _print_table(console, ("machine", ""), facts(probe.profile))
    for grid in grids(probe.profile):
        lines = heat_map(grid, width=min(100, console.width), ascii_only=console.options.ascii_only)
        console.print("", *lines, sep="\n", soft_wrap=True, highlight=False, markup=False)


def rows(probe: Probe) -> list[tuple[str, ...]]:
    """One row of text per measurement, under COLUMNS."""
    return [
        (m.what, m.text, f"{m.spread:.1%}", str(m.runs), "" if m.steady else "unsteady")
        for m in probe.measurements
    ]


def facts(profile: HardwareProfile) -> list[tuple[str, ...]]:
    """(what, value) of the machine's sizes and links."""
    found: list[tuple[str, ...]] = [("device", profile.device_name)]
    if profile.device == "cuda":
        found += [("SMs", str(profile.sms)), ("HBM", format_bytes(profile.hbm_capacity_bytes))]
    for key, what in FACTS.items():
        if (value := profile.facts.get(key)) is not None:
            found.append((what, format_bytes(value) if isinstance(value, int) else value))
    return found


def _print_table(
    console: "Console", columns: tuple[str, ...], cells: list[tuple[str, ...]]
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(columns):
        right = len(columns) > 2 and 0 < number < len(columns) - 1
        table.add_column(title, justify="right" if right else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table, highlight=False)
