"""Measures a CPU: the bandwidth of its memory, and rates and costs of ops with reference kernels.

Uses torch's default threads. A profile has one cost for all dtypes, so costs are means over
COST_DTYPES; rates are by dtype. run.py saves the profile.
"""

import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from dakrun.config import DTYPE_BYTES, Dtype, SamplingParams
from dakrun.engine.sampler import sample
from dakrun.errors import CannotRun
from dakrun.formats import Rows, Split
from dakrun.geometry import row_block_count
from dakrun.hardware import ComputeRate, HardwareProfile, OpCosts, RemoteTier, cpu_name
from dakrun.hardware.parts import MIN_EFFICIENCY
from dakrun.kernels import reference
from dakrun.lab.samples import Log, Measurement, call_seconds, provenance
from dakrun.memory.limits import available_host_memory
from dakrun.memory.matrix import MatrixPart, TieredMatrix
from dakrun.models.functional import layer_norm, rms_norm
from dakrun.units import format_bytes

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
COST_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
ROWS = 8  # of norms and sampling
NORM_COLUMNS, VOCABULARY = 2**14, 2**15

Op = Callable[[int, int, torch.dtype], Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and repetitions for measuring a CPU.

    The memory buffer has `buffer_bytes`, or `caches` times the last-level cache if that is more.
    Linear ops read weights of `weight_size` rows and columns from it. Every figure takes at least
    `seconds` and `runs`.
    """

    buffer_bytes: int
    caches: int
    weight_size: int = 1024
    batch_sizes: tuple[int, ...] = (1, 8, 64, 512)
    seconds: float
    runs: int


FULL = Sizes(buffer_bytes=2**29, caches=8, seconds=0.6, runs=5)
QUICK = Sizes(buffer_bytes=3 * 2**26, caches=4, seconds=0.08, runs=3)


class Stopwatch(Log):
    """Times calls as often as `sizes` says and logs the measurements."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def rate(self, name: str, unit: str, work: float, call: Callable[[], object]) -> float:
        """Median of `work` over the seconds of a call."""
        return self.measure(name, unit, lambda: [work / t for t in self._times(call)])

    def seconds(self, name: str, call: Callable[[], object]) -> float:
        """Median of the seconds of a call."""
        return self.measure(name, "s", lambda: self._times(call))

    def _times(self, call: Callable[[], object]) -> list[float]:
        return call_seconds(call, self.sizes.runs, least_s=self.sizes.seconds)


def measure_cpu(name: str, sizes: Sizes) -> tuple[HardwareProfile, tuple[Measurement, ...]]:
    """Measure this machine's CPU and memory with torch's threads, in about a minute (FULL).

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
    watch, buffer, half = Stopwatch(sizes), torch.rand(nbytes // 4), available // 2
    read, copy = _memory_rates(watch, buffer)
    compute = {dtype: compute_rate(watch, dtype, buffer) for dtype in DTYPES}
    host = RemoteTier(
        name="host",
        capacity_bytes=half,
        direct_bytes_per_s=read,
        staged_bytes_per_s=copy,
        window_bytes=2**18,
        sms=1,
        group="memory",
    )
    costs = {
        "linear": linear_costs(watch),
        "attention": attention_costs(watch, buffer, compute, read),
        "norm": norm_costs(watch, read),
        "sampling": sampling_costs(watch, read),
    }
    return HardwareProfile(
        name=name,
        description="this CPU; both tiers are its memory, so offloading gains nothing",
        provenance=provenance(
            f"{torch.get_num_threads()} threads of torch {torch.__version__}; memory with "
            f"{nbytes >> 20} MiB of random data, linear ops with weights from there; "
            "each tier gets half of the free memory",
            watch.measurements,
        ),
        device="cpu",
        device_name=cpu_name(),
        sms=len(os.sched_getaffinity(0)),
        hbm_capacity_bytes=half,
        hbm_bytes_per_s=read,
        context_bytes=0,
        remote=(host,),
        compute=compute,
        link_groups={"memory": read},
        hbm_group="memory",
        **costs,  # type: ignore[arg-type]
    ), tuple(watch.measurements)


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core; 32 MiB if the kernel does not report it."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(file.read_text().strip().removesuffix("K")) * 1024 for file in files]
    return max(sizes, default=32 * 2**20)


def _memory_rates(watch: Stopwatch, buffer: torch.Tensor) -> tuple[float, float]:
    """Bytes/s read, by the faster of two readers, and bytes/s copied.

    A copied byte is read and written, but counts once.
    """
    cols = min(2048, 1 << (buffer.numel().bit_length() // 2))
    weight = buffer[: buffer.numel() // cols * cols].view(-1, cols)
    product = partial(torch.mm, weight, torch.rand(cols, 1))
    copy = partial(torch.empty_like(buffer).copy_, buffer)
    read = max(
        watch.rate("memory read, sum", "B/s", buffer.nbytes, buffer.sum),
        watch.rate("memory read, matmul N=1", "B/s", weight.nbytes, product),
    )
    return read, watch.rate("memory copy", "B/s", buffer.nbytes, copy)


def compute_rate(watch: Stopwatch, dtype: Dtype, buffer: torch.Tensor) -> ComputeRate:
    """FLOP/s of linear ops whose weights come from memory, as those of a decode step do.

    Cores hide little of the reading behind arithmetic, so the time of a rate includes the reading.
    """
    size, points = watch.sizes.weight_size, []
    values = buffer.to(getattr(torch, dtype))
    count = values.numel() // size**2
    matrices = values[: count * size**2].view(count, size, size)
    weights = itertools.cycle([_whole(matrix) for matrix in matrices])
    for n in watch.sizes.batch_sizes:
        x = torch.rand(n, size).to(values.dtype)

        def call(x: torch.Tensor = x) -> None:
            reference.linear(x, next(weights), x[0])

        rate = watch.rate(f"linear {dtype} N={n}", "FLOP/s", 2.0 * n * size * size, call)
        points.append((n, rate))
    return ComputeRate(peak=max(rate for _, rate in points), measured=tuple(points))


def linear_costs(watch: Stopwatch) -> OpCosts:
    """Fixed cost of a linear op with bias and residual; its bytes and FLOPs are negligible.

    The efficiency is 1, as the compute rates are those of whole ops.
    """
    weight, x = _whole(torch.rand(8, 8)), torch.rand(1, 8)
    seconds = watch.seconds("linear, fixed", lambda: x + reference.linear(x, weight, x[0]))
    return OpCosts(rows=(1,), seconds=(seconds,), efficiency=(1.0,))


def _costs(
    watch: Stopwatch, name: str, rows: Sequence[int], op: Op, sizes: Sequence[int], read: float,
    elements: int, compute: Mapping[Dtype, ComputeRate] | None = None,
) -> OpCosts:  # fmt: skip
    """Costs by `rows` of the calls that op(n, size, dtype) makes.

    The first of `sizes` is small, so that its time is the fixed cost. The second, over n, is large:
    the efficiency is its least time over its time without the fixed cost. It reads and writes
    `elements` from `read` bytes/s, and computes 2 FLOP with each if `compute` is given. Both
    figures are means over COST_DTYPES.
    """
    seconds, efficiency = [], []
    for n in rows:
        fixed, ratios = [], []
        for dtype in COST_DTYPES:
            small, large = (
                op(n, size, getattr(torch, dtype)) for size in (sizes[0], sizes[1] // n)
            )
            bound = DTYPE_BYTES[dtype] * elements / read
            if compute is not None:
                bound = max(bound, 2.0 * elements / compute[dtype].at(n))
            fixed.append(watch.seconds(f"{name} {dtype} N={n}, fixed", small))
            beyond = watch.seconds(f"{name} {dtype} N={n}", large) - fixed[-1]
            ratios.append(min(1.0, bound / beyond) if beyond > 0 else 1.0)
        seconds.append(statistics.geometric_mean(fixed))
        efficiency.append(max(MIN_EFFICIENCY, statistics.geometric_mean(ratios)))
    return OpCosts(rows=tuple(rows), seconds=tuple(seconds), efficiency=tuple(efficiency))


def attention_costs(
    watch: Stopwatch, buffer: torch.Tensor, compute: Mapping[Dtype, ComputeRate], read: float
) -> OpCosts:
    """Costs of decode attention by slots, of one position and of as many as `buffer` has."""
    heads, dim = 8, 64
    position = 2 * heads * dim

    def op(slots: int, length: int, dtype: torch.dtype) -> Callable[[], object]:
        used = buffer[: slots * length * position].to(dtype)
        kept = used.view(slots, 2, length, heads, dim)
        q = torch.rand(slots, heads, dim).to(dtype)

        def attend() -> torch.Tensor:
            copies = [slot.clone().transpose(1, 2) for slot in kept]  # as blocks are gathered
            caches = [(keys, values) for keys, values in copies]
            return reference.decode_attention(q, caches, dim**-0.5)

        return attend

    most, rows = buffer.numel() // position, watch.sizes.batch_sizes
    return _costs(watch, "attention", rows, op, (1, most), read, most * position, compute)


def norm_costs(watch: Stopwatch, read: float) -> OpCosts:
    """Costs of a norm beyond reading and writing X, the mean of both kinds."""

    def op(n: int, cols: int, dtype: torch.dtype) -> Callable[[], object]:
        x, weight = torch.rand(n, cols).to(dtype), torch.rand(cols).to(dtype)
        return lambda: (layer_norm(x, weight, weight), rms_norm(x, weight, 1e-5))

    most = ROWS * NORM_COLUMNS
    both = _costs(watch, "two norms", (ROWS,), op, (8, most), read, 2 * 2 * most)
    return replace(both, seconds=tuple(seconds / 2 for seconds in both.seconds))


def sampling_costs(watch: Stopwatch, read: float) -> OpCosts:
    """Costs of choosing the most likely tokens beyond reading their logits."""

    def op(n: int, vocab: int, dtype: torch.dtype) -> Callable[[], object]:
        logits = torch.rand(n, vocab).to(dtype)
        rows = [SamplingParams()] * n, range(n), range(n)
        return lambda: sample(logits, *rows)

    most = ROWS * VOCABULARY
    return _costs(watch, "sampling", (ROWS,), op, (8, most), read, most)


def _whole(data: torch.Tensor) -> TieredMatrix:
    """`data` [M, K] as a matrix of one part."""
    rows, cols = data.shape
    arrays = (data.view(-1).view(torch.uint8),)
    part = MatrixPart("host", Split(row_block_count(rows)), Rows(data.itemsize), arrays)
    return TieredMatrix((rows, cols), data.dtype, (part,))
