"""Sizes and repetitions of measurements, and their results: medians with their spread.

Effort has the sizes and points for a GPU (cpu.py has a CPU's). Needs neither torch nor a GPU.
"""

import datetime
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dakrun.errors import CannotRun
from dakrun.hardware import LOCAL, Card, Provenance
from dakrun.units import format_bytes, format_seconds

KIB, MIB = 2**10, 2**20
STEADY = 0.05  # spread up to which a figure is steady
MIN_BYTES = 256 * MIB  # minimum size of a buffer; a smaller one would measure L2

Ring = tuple[int, int]  # chunk in bytes, stages


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes, points and repetitions for measuring a GPU.

    `*_bytes` of tiers are buffer sizes; a reading takes `seconds`, a figure `runs` readings.
    `l2_bytes` are working sets around the size of L2. The congestion grid has `windows` (bytes in
    flight) and `sms`. `op_bytes` are sizes of ops in chains. `rows` of X are measured with
    SplitK_GEMM, `many_rows` with the kernel for more rows, `slots` with attention and sampling,
    `batch_sizes` with cuBLAS.
    """

    seconds: float
    runs: int
    hbm_bytes: int
    hbm_rings: tuple[Ring, ...]
    l2_bytes: tuple[int, ...]
    host_bytes: int
    peer_bytes: int
    remote_rings: tuple[Ring, ...]
    windows: tuple[int, ...]
    sms: tuple[int, ...]
    op_bytes: tuple[int, ...]
    rows: tuple[int, ...]
    many_rows: tuple[int, ...]
    slots: tuple[int, ...]
    batch_sizes: tuple[int, ...]


FULL = Effort(
    seconds=0.02,
    runs=5,
    hbm_bytes=8 * 2**30,
    hbm_rings=((4 * KIB, 8), (8 * KIB, 8), (16 * KIB, 4), (16 * KIB, 8), (16 * KIB, 12),
               (32 * KIB, 6)),
    l2_bytes=tuple(n * MIB for n in (4, 16, 24, 32, 64, 256)),
    host_bytes=4 * 2**30,
    peer_bytes=4 * 2**30,
    remote_rings=((2 * KIB, 2), (4 * KIB, 4), (8 * KIB, 4), (8 * KIB, 8), (16 * KIB, 8)),
    windows=tuple(2**i for i in range(15, 24)),
    sms=(1, 2, 4, 8, 16, 32, 64),
    op_bytes=tuple(n * MIB for n in (4, 8, 32, 64, 128, 256, 512)),
    rows=(8, 16, 32, 64),
    many_rows=(128, 256, 512, 1024, 2048, 4096),
    slots=(8, 64, 512),
    batch_sizes=tuple(2**i for i in range(3, 13)),
)  # fmt: skip
QUICK = Effort(
    seconds=0.006,
    runs=3,
    hbm_bytes=2 * 2**30,
    hbm_rings=((16 * KIB, 8), (16 * KIB, 12), (32 * KIB, 6)),
    l2_bytes=(),
    host_bytes=2**29,
    peer_bytes=2**30,
    remote_rings=((8 * KIB, 4), (16 * KIB, 8)),
    windows=tuple(2**i for i in range(17, 23)),
    sms=(2, 4, 8, 16, 32),
    op_bytes=tuple(n * MIB for n in (8, 32, 128, 256)),
    rows=(8, 64),
    many_rows=(128, 1024),
    slots=(8, 512),
    batch_sizes=(8, 64, 512, 2048),
)


def ring_for(per_cta: int, card: Card) -> Ring | None:
    """A ring with `per_cta` bytes, a power of two, in flight; None if `card` has none."""
    chunk = min(max(per_cta // 4, KIB), 16 * KIB)
    stages = per_cta // chunk
    return (chunk, stages) if 2 <= stages <= 8 and per_cta <= card.lone_ring_bytes else None


def fitting(rings: Iterable[Ring], card: Card) -> list[Ring]:
    """The `rings`, each with as many of its stages as fit on `card`."""
    room = card.lone_ring_bytes
    return list(dict.fromkeys((chunk, min(stages, room // chunk)) for chunk, stages in rings))


def buffer_sizes(
    effort: Effort, free: int, host_memory: int, peers: Sequence[int]
) -> dict[str, int]:
    """Bytes of the buffers by tier, in whole MiB; `free` GPU and `host_memory` bytes are available.

    Raises CannotRun if one is smaller than MIN_BYTES.
    """
    sizes = {
        LOCAL: min(effort.hbm_bytes, free // 2),
        "host": min(effort.host_bytes, host_memory // 4),
        **{f"peer:{gpu}": effort.peer_bytes for gpu in peers},
    }
    for tier, size in sizes.items():
        if size < MIN_BYTES:
            raise CannotRun(
                f"measuring needs at least {format_bytes(MIN_BYTES)} of {tier} memory, "
                f"{format_bytes(size)} are available",
                hint="end other programs that use it, or plan with a shipped profile",
            )
    return {tier: size // MIB * MIB for tier, size in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A median over `runs` runs; `spread` is the interquartile range over the median."""

    name: str
    value: float
    unit: str
    spread: float
    runs: int

    @property
    def steady(self) -> bool:
        """Whether the spread is small enough to plan with."""
        return self.spread <= STEADY

    @property
    def text(self) -> str:
        """The median with its unit."""
        if self.unit == "s":
            return format_seconds(self.value)
        if self.unit == "B":
            return format_bytes(self.value)
        return f"{self.value:.2f}" if not self.unit else f"{self.value / 1e9:,.1f} G{self.unit}"


@dataclass
class Log:
    """Measurements in the order in which they were taken."""

    measurements: list[Measurement] = field(default_factory=list)

    def measure(self, name: str, unit: str, samples: Callable[[], Sequence[float]]) -> float:
        """Log the median of `samples` as `name`; an unsteady one is measured once more."""
        return self.add(name, unit, steadier(samples))

    def add(self, name: str, unit: str, values: Sequence[float]) -> float:
        """Log the median of `values` as `name`."""
        return self.keep(name, unit, statistics.median(values), spread(values), len(values))

    def keep(self, name: str, unit: str, value: float, spread: float, runs: int) -> float:
        """Log a median of `runs` values, rounded to four digits."""
        found = Measurement(
            name=name, value=float(f"{value:.4g}"), unit=unit, spread=spread, runs=runs
        )
        self.measurements.append(found)
        return found.value


def steadier(samples: Callable[[], Sequence[float]]) -> Sequence[float]:
    """Samples; if they are not steady, the steadier of two sets of samples."""
    values = samples()
    return values if spread(values) <= STEADY else min(values, samples(), key=spread)


def spread(values: Sequence[float], *, of: Sequence[float] | None = None) -> float:
    """Interquartile range of two or more `values` over their median, or over the median `of` what
    they are a part of."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / (median if of is None else statistics.median(of))


def provenance(source: str, measurements: Sequence[Measurement]) -> Provenance:
    """Date and `source` of a profile measured today, and how far its figures spread."""
    unsteady = [m for m in measurements if not m.steady]
    worst = max(measurements, key=lambda m: m.spread)
    return Provenance(
        kind="measured",
        date=datetime.date.today().isoformat(),
        source=f"dakrun profile: medians; {source}; {len(unsteady)} of {len(measurements)} figures "
        f"spread by more than {STEADY:.0%}, most of all {worst.name} ({worst.spread:.0%})",
    )
