"""Measures a CPU: bandwidth of memory, rate of matrix products, costs of ops.

Uses torch's default threads and the reference kernels; run.py saves the profile.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dakrun.config import Dtype
from dakrun.errors import CannotRun
from dakrun.hardware import ComputeRate, HardwareProfile, OpCosts, RemoteTier, cpu_name
from dakrun.kernels import reference
from dakrun.memory import Part, PartitionedTensor, available_host_memory
from dakrun.probe.measurement import Log, Measurement, provenance
from dakrun.units import format_bytes

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and repetitions for measuring a CPU.

    The memory buffer has `buffer_bytes`, or `caches` times the last-level cache if that is more. A
    weight of `weight_size` rows and columns stays in the cache. Every figure takes at least
    `seconds` and `runs`.
    """

    buffer_bytes: int
    caches: int
    weight_size: int = 512
    batch_sizes: tuple[int, ...] = (1, 8, 64, 512)
    seconds: float
    runs: int


FULL = Sizes(buffer_bytes=2**29, caches=8, seconds=0.6, runs=5)
QUICK = Sizes(buffer_bytes=3 * 2**26, caches=4, seconds=0.08, runs=3)


class _Stopwatch(Log):
    """Times calls as often as `sizes` says and logs the measurements."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def rate(self, name: str, unit: str, work: float, call: Callable[[], object]) -> float:
        """Median of `work` over the seconds of a call."""
        return self.measure(name, unit, lambda: [work / t for t in self._times(call)])

    def seconds(self, name: str, ops: int, call: Callable[[], object]) -> float:
        """Median of the seconds of one op; a call runs `ops`."""
        return self.measure(name, "s", lambda: [t / ops for t in self._times(call)])

    def _times(self, call: Callable[[], object]) -> list[float]:
        call()
        times: list[float] = []
        while len(times) < self.sizes.runs or sum(times) < self.sizes.seconds:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times


@dataclass(frozen=True)
class _Roofline:
    """Seconds of an empty op, bytes/s of memory, and FLOP/s by batch size."""

    op_seconds: float
    read: float
    flops: Callable[[int], float]

    def bound(self, nbytes: float, flops: float, n: int) -> float:
        """Lower bound in seconds of an op of batch size `n`."""
        return max(nbytes / self.read, flops / self.flops(n))


def measure_cpu(name: str, sizes: Sizes) -> tuple[HardwareProfile, tuple[Measurement, ...]]:
    """Measure this machine's CPU and memory with torch's threads, in about half a minute (FULL).

    Raises CannotRun if memory is short.
    """
    available = available_host_memory()
    nbytes = max(sizes.buffer_bytes, sizes.caches * last_level_cache())
    if 3 * nbytes > available:  # the buffer, its copy, and room for other programs
        raise CannotRun(
            f"measuring needs {format_bytes(3 * nbytes)} of memory, "
            f"{format_bytes(available)} are free",
            hint="free some memory, or plan with --profile cpu",
        )
    watch = _Stopwatch(sizes)
    buffer = torch.rand(nbytes // 4)
    read, copy = _memory_rates(watch, buffer)
    compute = {dtype: _compute_rate(watch, dtype) for dtype in DTYPES}
    op_seconds = _op_seconds(watch)
    flops = compute["float32"].at
    roofline = _Roofline(op_seconds, read, flops)
    linear = _linear_costs(watch, buffer, roofline)
    attention = _attention_costs(watch, buffer, roofline)
    half = available // 2
    profile = HardwareProfile(
        name=name,
        description="this CPU; both tiers are its memory, so offloading gains nothing",
        provenance=provenance(
            f"{torch.get_num_threads()} threads of torch {torch.__version__}; memory with "
            f"{nbytes >> 20} MiB of random data, matmul with a weight that stays in the cache; "
            "each tier gets half of the free memory",
            watch.measurements,
        ),
        device="cpu",
        device_name=cpu_name(),
        sms=len(os.sched_getaffinity(0)),
        hbm_capacity_bytes=half,
        hbm_bytes_per_s=read,
        context_bytes=0,
        linear=linear,
        attention=attention,
        remote=(
            RemoteTier(
                name="host",
                capacity_bytes=half,
                direct_bytes_per_s=read,
                staged_bytes_per_s=copy,
                window_bytes=2**18,
                sms=1,
                group="memory",
            ),
        ),
        compute=compute,
        link_groups={"memory": read},
        hbm_group="memory",
    )
    return profile, tuple(watch.measurements)


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core; 32 MiB if the kernel does not report it."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(file.read_text().strip().removesuffix("K")) * 1024 for file in files]
    return max(sizes, default=32 * 2**20)


def _memory_rates(watch: _Stopwatch, buffer: torch.Tensor) -> tuple[float, float]:
    """Bytes/s read, by the faster of two readers, and bytes/s copied.

    A copied byte is read and written, but counts once.
    """
    nbytes = float(buffer.nbytes)
    weight = _as_weight(buffer)
    x = torch.rand(weight.shape[1], 1)
    read = max(
        watch.rate("memory read, sum", "B/s", nbytes, buffer.sum),
        watch.rate("memory read, matmul N=1", "B/s", weight.nbytes, partial(torch.mm, weight, x)),
    )
    copied = torch.empty_like(buffer)
    return read, watch.rate("memory copy", "B/s", nbytes, partial(copied.copy_, buffer))


def _compute_rate(watch: _Stopwatch, dtype: Dtype) -> ComputeRate:
    """FLOP/s of the matrix product in reference.linear: weight times x transposed.

    The weight stays in the cache, since plans count reading it from memory separately.
    """
    size, points = watch.sizes.weight_size, []
    weight = torch.rand(size, size).to(getattr(torch, dtype))
    for n in watch.sizes.batch_sizes:
        xt = torch.rand(size, n).to(weight.dtype)
        call = partial(torch.mm, weight, xt, out=torch.empty_like(xt))
        rate = watch.rate(f"matmul {dtype} N={n}", "FLOP/s", 2.0 * n * size * size, call)
        points.append((n, rate))
    return ComputeRate(peak=max(rate for _, rate in points), measured=tuple(points))


def _op_seconds(watch: _Stopwatch) -> float:
    """Seconds of a linear op whose bytes and FLOPs are negligible."""
    weight, x = _whole(torch.rand(8, 8)), torch.rand(1, 8)
    calls = 100

    def many() -> None:
        for _ in range(calls):
            reference.linear(x, weight)

    return watch.seconds("cost of an op", calls, many)


def _linear_costs(watch: _Stopwatch, buffer: torch.Tensor, roofline: _Roofline) -> OpCosts:
    """Costs of linear ops whose weight is read from memory, for batch sizes up to 64.

    The efficiency is the lower bound over the measured time.
    """
    weight = _whole(_as_weight(buffer))
    rows, cols = weight.shape
    sizes = tuple(n for n in watch.sizes.batch_sizes if n <= 64)
    found = []
    for n in sizes:
        x = torch.rand(n, cols)
        bound = roofline.bound(4 * rows * cols, 2.0 * n * rows * cols, n)
        call = partial(reference.linear, x, weight)
        found.append(min(1.0, watch.rate(f"linear efficiency N={n}", "", bound, call)))
    return OpCosts(rows=sizes, seconds=(roofline.op_seconds,) * len(sizes), efficiency=tuple(found))


def _attention_costs(watch: _Stopwatch, buffer: torch.Tensor, roofline: _Roofline) -> OpCosts:
    """Costs of decode attention over KV slots that are read from memory."""
    slots, heads, dim = 8, 8, 64
    length = buffer.numel() // (2 * slots * heads * dim)
    used = buffer[: 2 * slots * heads * length * dim].view(slots, 2, heads, length, dim)
    caches = [(slot[0], slot[1]) for slot in used]
    q = torch.rand(slots, heads, dim)
    bound = roofline.bound(used.nbytes, 2.0 * used.numel(), slots)
    positions = [length - 1] * slots
    call = partial(reference.decode_attention, q, q, q, caches, positions, dim**-0.5)
    efficiency = min(1.0, watch.rate("attention efficiency", "", bound, call))
    return OpCosts(rows=(slots,), seconds=(roofline.op_seconds,), efficiency=(efficiency,))


def _as_weight(buffer: torch.Tensor) -> torch.Tensor:
    """`buffer` as a matrix with rows of 2,048 elements, or fewer if it is small."""
    cols = min(2048, 1 << (buffer.numel().bit_length() // 2))
    return buffer[: buffer.numel() // cols * cols].view(-1, cols)


def _whole(data: torch.Tensor) -> PartitionedTensor:
    """`data` [M, K] as a PartitionedTensor of one part."""
    rows, cols = data.shape
    part = Part("host", slice(0, rows), data)
    return PartitionedTensor((rows, cols), data.dtype, (part,))
