"""A congestion sweep as a grid of total rates, and that grid as lines of text.

Pure functions; nothing depends on colour. What drawing needs besides is in plot.py.
"""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from dakrun.hardware.profile import HardwareProfile, RemoteTier, Sweep

CONGESTION = "congestion"  # the sweep of tier `host` is called "host congestion"
MARK = "*"
# A character per shade from the lowest rate up, and the share of the best rate each starts at.
BLOCKS, ASCII = " ░▒▓█", " .:+#"
SHADES_FROM = (0.0, 0.75, 0.90, 0.97, 0.99)

Point = tuple[int, int]  # SMs that read the remote tier, bytes that they keep in flight


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Bytes/s of a remote tier and HBM together at each point that was measured.

    `sms` and `in_flight` are the rows and columns, ascending; `chosen` is the measured point that
    the profile's window and SM count stand for, or the one nearest to them (then not `exact`).
    """

    tier: str
    sms: tuple[int, ...]
    in_flight: tuple[int, ...]
    total: Mapping[Point, float]
    chosen: Point
    exact: bool

    @property
    def best(self) -> float:
        """The highest total rate in bytes/s."""
        return max(self.total.values())

    @property
    def chosen_text(self) -> str:
        """What the mark stands for."""
        sms, in_flight = self.chosen
        where = f"{sms} SMs, {short_bytes(in_flight)} in flight"
        rate = f"{self.total[self.chosen] / 1e9:.0f} GB/s"
        return f"{'chosen' if self.exact else 'nearest to the chosen'}: {where}, {rate}"


def grids(profile: HardwareProfile) -> list[Grid]:
    """A grid for every remote tier of `profile` that has a congestion sweep."""
    sweeps = [(tier, profile.sweeps.get(f"{tier.name} {CONGESTION}")) for tier in profile.remote]
    return [grid(tier, sweep) for tier, sweep in sweeps if sweep is not None and sweep.rows]


def grid(tier: RemoteTier, sweep: Sweep) -> Grid:
    """The congestion `sweep` of `tier`, which has a row or more; the best of repeated points."""
    total: dict[Point, float] = {}
    columns = ("sms", "in_flight_bytes", "remote_bytes_per_s", "hbm_bytes_per_s")
    for sms, in_flight, remote, hbm in zip(*map(sweep.column, columns), strict=True):
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
    """`grid` as lines of at most `width` columns: SMs down, bytes in flight across.

    A cell has the total in GB/s, its shade twice, and MARK where it is the chosen point. Columns
    that do not fit side by side follow below in blocks of their own; one always has its place.
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


def _shade(grid: Grid, point: Point) -> int:
    share = grid.total.get(point, 0.0) / grid.best
    return max(step for step, start in enumerate(SHADES_FROM) if share >= start)


def _blocks(columns: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """`columns` in the fewest blocks of at most `most`, as even as can be."""
    count = math.ceil(len(columns) / max(1, most))
    size = math.ceil(len(columns) / count)
    return [columns[start : start + size] for start in range(0, len(columns), size)]


def _distance(one: Point, other: Point) -> float:
    """How far apart two points lie when both axes are logarithmic."""
    return math.hypot(*(math.log(max(a, 1) / max(b, 1)) for a, b in zip(one, other, strict=True)))
