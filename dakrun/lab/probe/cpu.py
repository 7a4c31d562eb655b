"""Measures a CPU: the bandwidth of its memory, and with cpu_costs.py rates and costs of ops.

Uses torch's default threads; run.py saves the profile.
"""

import os
from functools import partial
from pathlib import Path

import torch

from dakrun.config import Dtype
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile, RemoteTier, cpu_name
from dakrun.lab.probe.cpu_costs import (
    Sizes,
    Stopwatch,
    attention_costs,
    compute_rate,
    linear_costs,
    norm_costs,
    sampling_costs,
)
from dakrun.lab.probe.measurement import Measurement, provenance
from dakrun.memory.limits import available_host_memory
from dakrun.units import format_bytes

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


FULL = Sizes(buffer_bytes=2**29, caches=8, seconds=0.6, runs=5)
QUICK = Sizes(buffer_bytes=3 * 2**26, caches=4, seconds=0.08, runs=3)


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
    watch = Stopwatch(sizes)
    buffer = torch.rand(nbytes // 4)
    read, copy = _memory_rates(watch, buffer)
    compute = {dtype: compute_rate(watch, dtype, buffer) for dtype in DTYPES}
    linear = linear_costs(watch)
    attention = attention_costs(watch, buffer, compute, read)
    norm = norm_costs(watch, read)
    sampling = sampling_costs(watch, read)
    half = available // 2
    profile = HardwareProfile(
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
        linear=linear,
        attention=attention,
        norm=norm,
        sampling=sampling,
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


def _memory_rates(watch: Stopwatch, buffer: torch.Tensor) -> tuple[float, float]:
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


def _as_weight(buffer: torch.Tensor) -> torch.Tensor:
    """`buffer` as a matrix with rows of 2,048 elements, or fewer if it is small."""
    cols = min(2048, 1 << (buffer.numel().bit_length() // 2))
    return buffer[: buffer.numel() // cols * cols].view(-1, cols)
