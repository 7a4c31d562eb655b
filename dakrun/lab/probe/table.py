"""The text output of `dakrun profile`: a row per measurement, the machine's sizes, heat maps.

A heat map has the total rate of HBM and a remote tier, by SMs and bytes in flight. Nothing depends
on colour; plot.py draws pictures.
"""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dakrun.hardware import HardwareProfile, RemoteTier, Sweep
from dakrun.lab.probe.run import Probe
from dakrun.tables import Column, print_table
from dakrun.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

CONGESTION = "congestion"  # sweep names are "host congestion" and the like
MARK = "*"
# Shades from the lowest rate up, and the fraction of the best rate at which each starts.
BLOCKS, ASCII = " ░▒▓█", " .:+#"
SHADES_FROM = (0.0, 0.75, 0.90, 0.97, 0.99)

COLUMNS = (
    Column("figure", "left", wraps=True),
    *map(Column, ("median", "spread", "runs")),
    Column("", "left"),
)
FACT_COLUMNS = Column("machine", "left"), Column("", "left", wraps=True)
SPREAD = "spread: interquartile range over the median"
EFFICIENCY = (
    "efficiency: lower bound from the other figures over an op's time without its fixed cost"
)
FACTS = {
    "compute_capability": "compute capability",
    "shared_bytes_per_sm": "shared memory per SM",
    "l2_bytes": "L2",
    "host_memory_bytes": "host memory that can be page-locked",
    "numa": "NUMA",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "torch": "torch",
    "cuda": "CUDA",
}


Cell = tuple[int, int]  # SMs that read the remote tier, bytes in flight


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Bytes/s of a remote tier and HBM together, at each measured point.

    `sms` and `in_flight` are the rows and columns, ascending. `chosen` is the point of the
    profile's window and SMs, or the measured point nearest to it (then not `exact`).
    """

    tier: str
    sms: tuple[int, ...]
    in_flight: tuple[int, ...]
    total: Mapping[Cell, float]
    chosen: Cell
    exact: bool

    @property
    def best(self) -> float:
        """The highest total rate in bytes/s."""
        return max(self.total.values())

    @property
    def chosen_text(self) -> str:
        """The legend of the mark."""
        sms, in_flight = self.chosen
        where = f"{sms} SMs, {short_bytes(in_flight)} in flight"
        rate = f"{self.total[self.chosen] / 1e9:.0f} GB/s"
        return f"{'chosen' if self.exact else 'nearest to the chosen'}: {where}, {rate}"


def render(probe: Probe, console: "Console") -> None:
    """Print `probe` as tables, legends and heat maps within the console's width."""
    rows = [
        (m.name, m.text, f"{m.spread:.1%}", str(m.runs), "" if m.steady else "unsteady")
        for m in probe.measurements
    ]
    print_table(console, COLUMNS, rows, gap=2)
    legend = [SPREAD, *([EFFICIENCY] if any(not m.unit for m in probe.measurements) else [])]
    console.print("; ".join(legend), highlight=False)
    console.print()
    print_table(console, FACT_COLUMNS, facts(probe.profile), gap=2)
    for grid in grids(probe.profile):
        lines = heat_map(grid, width=min(100, console.width), ascii_only=console.options.ascii_only)
        console.print("", *lines, sep="\n", soft_wrap=True, highlight=False, markup=False)


def facts(profile: HardwareProfile) -> list[tuple[str, ...]]:
    """(name, value) of the machine's sizes and links."""
    found: list[tuple[str, ...]] = [("device", profile.device_name)]
    if profile.device == "cuda":
        found += [("SMs", str(profile.sms)), ("HBM", format_bytes(profile.hbm_capacity_bytes))]
    for key, name in FACTS.items():
        if (value := profile.facts.get(key)) is not None:
            found.append((name, format_bytes(value) if isinstance(value, int) else value))
    return found


def grids(profile: HardwareProfile) -> list[Grid]:
    """The grids of all remote tiers with a congestion sweep."""
    sweeps = [(tier, profile.sweeps.get(f"{tier.name} {CONGESTION}")) for tier in profile.remote]
    return [grid(tier, sweep) for tier, sweep in sweeps if sweep is not None and sweep.rows]


def grid(tier: RemoteTier, sweep: Sweep) -> Grid:
    """The grid of a congestion sweep with at least one row; repeated points keep their best."""
    total: dict[Cell, float] = {}
    columns = ("sms", "in_flight_bytes", "remote_bytes_per_s", "hbm_bytes_per_s")
    for sms, in_flight, remote, hbm in sweep.points(*columns):
        point = round(sms), round(in_flight)
        total[point] = max(remote + hbm, total.get(point, 0.0))
    wanted = tier.sms, tier.window_bytes
    return Grid(
        tier=tier.name,
        sms=tuple(sorted({sms for sms, _ in total})),
        in_flight=tuple(sorted({in_flight for _, in_flight in total})),
        total=total,
        chosen=min(total, key=lambda point: _distance(point, wanted)),
        exact=wanted in total,
    )


def heat_map(grid: Grid, *, width: int = 100, ascii_only: bool = False) -> list[str]:
    """`grid` as lines of at most `width` characters: SMs down, bytes in flight across.

    A cell has the total in GB/s, its shade twice, and MARK at the chosen point. Columns that do not
    fit continue in further blocks, with at least one column each.
    """
    texts = {point: f"{rate / 1e9:.0f}" for point, rate in grid.total.items()}
    heads = {in_flight: short_bytes(in_flight) for in_flight in grid.in_flight}
    side = max(len("SMs"), *(len(str(sms)) for sms in grid.sms))
    cell = max(1 + max(map(len, texts.values())), *map(len, heads.values()))
    shades = ASCII if ascii_only else BLOCKS
    title = f"{grid.tier} and HBM read together, GB/s"
    axes = f"down: SMs that read {grid.tier}; across: bytes they keep in flight"
    lines = textwrap.wrap(f"{title}; {axes}", width)
    for columns in _blocks(grid.in_flight, (width - side) // (cell + 3)):
        lines.append(f"{'SMs':>{side}}" + "".join(f"{heads[c]:>{cell}}   " for c in columns))
        for sms in grid.sms:
            line = f"{sms:>{side}}"
            for point in ((sms, column) for column in columns):
                shade = shades[_shade(grid, point)] * 2
                mark = MARK if point == grid.chosen else " "
                line += f"{texts.get(point, ''):>{cell}}{shade}{mark}"
            lines.append(line)
    steps = [f"{shades[i]} {SHADES_FROM[i]:.0%}" for i in range(len(SHADES_FROM) - 1, 0, -1)]
    legend = f"shade: {', '.join(steps)} of the best or more; empty: not possible"
    for line in (f"{MARK} {grid.chosen_text}", legend):
        lines += textwrap.wrap(line, width)
    return [line.rstrip() for line in lines]


def short_bytes(n: int) -> str:
    """`n` bytes in at most five characters with a binary unit, as in "64K" or "1.38M"."""
    for unit, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if n >= factor:
            return f"{n / factor:.{3 if n < 999.5 * factor else 4}g}{unit}"
    return str(n)


def _shade(grid: Grid, point: Cell) -> int:
    fraction = grid.total.get(point, 0.0) / grid.best
    return max(step for step, start in enumerate(SHADES_FROM) if fraction >= start)


def _blocks(columns: tuple[int, ...], limit: int) -> list[tuple[int, ...]]:
    """`columns` in the fewest blocks of at most `limit`, of nearly equal size."""
    count = math.ceil(len(columns) / max(1, limit))
    size = math.ceil(len(columns) / count)
    return [columns[start : start + size] for start in range(0, len(columns), size)]


def _distance(one: Cell, other: Cell) -> float:
    """Distance of two points on logarithmic axes."""
    return math.hypot(*(math.log(max(a, 1) / max(b, 1)) for a, b in zip(one, other, strict=True)))
