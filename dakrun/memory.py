"""Tiers: the memories that a plan fills, and matrices whose items lie in several of them.

The only place that allocates tier memory. Knows plans as numbers of units, not models.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dakrun.errors import CannotRun
from dakrun.hardware import LOCAL
from dakrun.plan.items import ItemGrid
from dakrun.plan.planner import Plan
from dakrun.units import format_bytes

ALIGNMENT = 256


class Tier:
    """One memory of fixed size that hands out aligned, uninitialised tensors and never grows."""

    def __init__(self, name: str, capacity: int, device: torch.device) -> None:
        self.name = name
        self.capacity = capacity
        self.used = 0
        if name == LOCAL and device.type != "cpu":
            self._buffer = torch.empty(capacity, dtype=torch.uint8, device=device)
        else:
            self._buffer = _map_pages(capacity)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of this tier; MemoryError where it does not fit any more."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        end = self.used + aligned(nbytes)
        if end > self.capacity:
            raise MemoryError(f"tier {self.name}: {nbytes} bytes asked, {self.free} left")
        block = self._buffer[self.used : self.used + nbytes]
        self.used = end
        return block.view(dtype).view(*shape)

    @property
    def free(self) -> int:
        """Bytes that are not handed out."""
        return self.capacity - self.used


@dataclass(frozen=True)
class Part:
    """A rectangle of a matrix in one tier: `data` is [rows, cols], row-major, contiguous."""

    tier: str
    rows: slice
    cols: slice
    data: torch.Tensor


@dataclass(frozen=True)
class PartitionedTensor:
    """A matrix [M, K] whose items lie in several tiers; each item in exactly one part.

    A part is whole bands, or some items of one band; parts follow the order of the items.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        placement: Sequence[tuple[str, int]],
        tiers: Mapping[str, Tier],
    ) -> "PartitionedTensor":
        """Allocate a matrix with `placement` (tier, number of items), in item order."""
        grid, first, parts = ItemGrid(*shape), 0, []
        for tier, count in placement:
            for rows, cols in grid.rectangles(first, first + count):
                size = (rows.stop - rows.start, cols.stop - cols.start)
                parts.append(Part(tier, rows, cols, tiers[tier].allocate(size, dtype)))
            first += count
        if first != grid.count:
            raise ValueError(f"{first} items placed of a matrix of {grid.count}")
        return cls(shape, dtype, tuple(parts))

    def dense(self) -> torch.Tensor:
        """The matrix [M, K] in one piece, on the device of the first part."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.parts[0].data.device)
        for part in self.parts:
            out[part.rows, part.cols] = part.data.to(out.device)
        return out


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to what an allocation occupies."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def tier_capacities(plan: Plan, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each tier that hold the plan's matrices and KV slots, alignment included."""
    sizes = dict.fromkeys(plan.tiers, 0)
    for op in plan.weights():
        grid = ItemGrid(*op.op.shape)
        for counts in op.placement:
            first = 0
            for tier, count in zip(plan.tiers, counts, strict=True):
                for rows, cols in grid.rectangles(first, first + count):
                    elements = (rows.stop - rows.start) * (cols.stop - cols.start)
                    sizes[tier] += aligned(elements * dtype.itemsize)
                first += count
    for number, tier in enumerate(plan.tiers):
        sizes[tier] += aligned(plan.op("attention").resident_bytes(number))
    return sizes


def allocate_tiers(capacities: Mapping[str, int], device: torch.device) -> dict[str, Tier]:
    """Tiers of exactly the given sizes in bytes.

    Raises CannotRun before anything is allocated where this machine's memory does not hold them.
    """
    on_host = sum(
        size for name, size in capacities.items() if name != LOCAL or device.type == "cpu"
    )
    available = available_host_memory()
    if on_host > available:
        raise CannotRun(
            f"the plan needs {format_bytes(on_host)} of host memory, "
            f"{format_bytes(available)} are available",
            hint="lower --batch-size or --max-model-len, or use a machine with more memory",
        )
    return {name: Tier(name, size, device) for name, size in capacities.items()}


def available_host_memory() -> int:
    """Bytes of host memory that this process may still take: the kernel's and the cgroup's word."""
    available = _meminfo("MemAvailable")
    for limit_path, usage_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _read_int(limit_path), _read_int(usage_path)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage + _reclaimable(limit_path)))
    return available


def _map_pages(nbytes: int) -> torch.Tensor:
    """`nbytes` of private anonymous pages.

    Not huge ones: where memory is fragmented the kernel compacts it first, and filling a model
    then took twice as long.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise CannotRun(f"/proc/meminfo has no {key}", hint="dakrun needs Linux")


def _reclaimable(limit_path: str) -> int:
    """Page cache that the cgroup counts as used but gives back under pressure."""
    stat = Path(limit_path).with_name("memory.stat")
    if not stat.is_file():
        return 0
    fields = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
