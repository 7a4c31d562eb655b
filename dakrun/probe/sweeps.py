"""The sweeps of `dakrun profile` on a GPU: bandwidths of tiers alone, together, shared, copied.

Each returns a Sweep of medians. Knows buffers and their addresses, not profiles.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dakrun.hardware.profile import Sweep
from dakrun.kernels.bandwidth import Reader, Window, read_multicast, read_window
from dakrun.kernels.runtime.copy_engine import copy
from dakrun.probe.effort import KIB, QUICK, Effort, Ring, ring_for
from dakrun.probe.measurement import spread, steadier


@dataclass(frozen=True)
class Buffer:
    """Memory that the GPU can read: `tensor` is uint8 in any tier."""

    tensor: torch.Tensor

    def reader(self, ctas: int, ring: Ring, sharers: int = 1, nbytes: int = 0) -> Reader:
        """`ctas` CTAs that read it, or its first `nbytes`."""
        size = nbytes or self.tensor.numel()
        chunk, stages = ring
        return Reader(
            address=self.tensor.data_ptr(),
            bytes=size,
            ctas=ctas,
            chunk=chunk,
            stages=stages,
            sharers=sharers,
        )


@dataclass(frozen=True)
class Bench:
    """The GPU under test: its SMs, a buffer in HBM, and how much to measure with."""

    sms: int
    hbm: Buffer
    effort: Effort

    def readings(self, *readers: Reader) -> list[list[float]]:
        """Bytes/s of each reader, run after run, together."""
        runs = [read_window(readers, self.effort.seconds) for _ in range(self.effort.runs)]
        return [list(rates) for rates in zip(*runs, strict=True)]

    def repeat(self, sample: Callable[[], float]) -> list[float]:
        """What `sample` gives, run after run."""
        return [sample() for _ in range(self.effort.runs)]

    def alone(self, reader: Reader) -> list[float]:
        """Bytes/s of one reader, run after run."""
        return self.readings(reader)[0]


def hbm_sweep(bench: Bench) -> Sweep:
    """HBM alone by number of CTAs (one an SM), chunk and stages."""
    counts = (bench.sms,) if bench.effort is QUICK else (bench.sms, bench.sms * 9 // 10, 64)
    points = [(ctas, *ring) for ctas in counts for ring in bench.effort.hbm_rings]
    return _sweep(
        ("ctas", "chunk_bytes", "stages", "bytes_per_s"),
        points,
        lambda ctas, chunk, stages: bench.alone(bench.hbm.reader(ctas, (chunk, stages))),
    )


def l2_sweep(bench: Bench) -> Sweep:
    """Reads of the same bytes again and again, as many as L2 keeps, and more."""
    return _sweep(
        ("set_bytes", "bytes_per_s"),
        [(size,) for size in bench.effort.l2_bytes],
        lambda size: bench.alone(bench.hbm.reader(bench.sms, (8 * KIB, 8), nbytes=size)),
    )


def direct_sweep(bench: Bench, remote: Buffer) -> Sweep:
    """A remote tier alone by SMs, chunk and stages."""
    counts = sorted({*bench.effort.sms, bench.sms})
    points = [(sms, *ring) for sms in counts for ring in bench.effort.remote_rings]
    return _sweep(
        ("sms", "chunk_bytes", "stages", "bytes_per_s"),
        points,
        lambda sms, chunk, stages: bench.alone(remote.reader(sms, (chunk, stages))),
    )


def congestion_sweep(bench: Bench, remote: Buffer, hbm_ring: Ring) -> Sweep:
    """A remote tier and HBM together, by SMs and bytes in flight of the remote one."""
    rows = []
    for window in bench.effort.windows:
        for sms in bench.effort.sms:
            ring = ring_for(window // sms)
            if ring is None or sms >= bench.sms:
                continue
            readers = remote.reader(sms, ring), bench.hbm.reader(bench.sms - sms, hbm_ring)
            far, near = bench.readings(*readers)
            total = [a + b for a, b in zip(far, near, strict=True)]
            if spread(total) > 0.05:
                far, near = bench.readings(*readers)
                total = [a + b for a, b in zip(far, near, strict=True)]
            rows.append(
                (sms, window, statistics.median(far), statistics.median(near), spread(total))
            )
    columns = ("sms", "in_flight_bytes", "remote_bytes_per_s", "hbm_bytes_per_s", "spread")
    return rounded(columns, rows)


def amplification_sweep(bench: Bench, remote: Buffer) -> Sweep:
    """What reaches shared memory when several SMs read the same chunks of a remote tier."""
    ctas = 64 if bench.sms >= 64 else bench.sms // 8 * 8
    return _sweep(
        ("readers", "delivered_bytes_per_s"),
        [(1,), (2,), (4,), (8,)],
        lambda sharers: bench.alone(remote.reader(ctas, (8 * KIB, 8), sharers=sharers)),
    )


def multicast_sweep(bench: Bench, remote: Buffer, link_rate: float) -> Sweep:
    """Clusters whose leader fetches for all: bytes over the link, and into shared memory."""
    chunk, stages, ctas = 16 * KIB, 4, 64
    rows = []
    for size in (2, 4, 8):
        clusters = ctas // size
        read = partial(
            read_multicast,
            remote.tensor.data_ptr(),
            remote.tensor.numel(),
            clusters=clusters,
            size=size,
            chunk=chunk,
            stages=stages,
            chunks=max(stages, round(link_rate * bench.effort.seconds / (chunk * clusters))),
        )
        read()
        rates = steadier(partial(bench.repeat, read))
        link = statistics.median(rates)
        rows.append((size, link, size * link, spread(rates)))
    return rounded(("cluster", "link_bytes_per_s", "delivered_bytes_per_s", "spread"), rows)


def copy_rates(bench: Bench, to: torch.Tensor, of: torch.Tensor) -> list[float]:
    """Bytes/s of the copy engine from `of` to `to`, tensors of one size."""
    copy_seconds(to, of)
    return [of.numel() / copy_seconds(to, of) for _ in range(bench.effort.runs)]


def copy_seconds(to: torch.Tensor, of: torch.Tensor) -> float:
    """Seconds of one asynchronous copy."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    copy(to, of)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def staging_rates(
    bench: Bench, to: torch.Tensor, of: torch.Tensor, alone: float, hbm_ring: Ring
) -> tuple[list[float], list[float]]:
    """(copies, HBM reads) in bytes/s while the copy engine fills HBM and all SMs read it."""
    copied, read = [], []
    stream = torch.cuda.Stream()
    seconds = max(bench.effort.seconds, 0.02)
    rounds = max(1, round(seconds * alone / of.numel()))
    for _ in range(bench.effort.runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(rounds):
                copy(to, of)
            end.record()
        copying = rounds * of.numel() / alone
        window = Window([bench.hbm.reader(bench.sms, hbm_ring)], 0.9 * copying)
        read += window.rates()
        end.synchronize()
        copied.append(rounds * of.numel() / (float(start.elapsed_time(end)) * 1e-3))
    return copied, read


def _sweep(
    columns: tuple[str, ...],
    points: Sequence[tuple[int, ...]],
    samples: Callable[..., list[float]],
) -> Sweep:
    """Median and spread of `samples` at every point, measured again where unsteady."""
    rows = []
    for point in points:
        values = steadier(lambda point=point: samples(*point))  # type: ignore[misc]
        rows.append((*point, statistics.median(values), spread(values)))
    return rounded((*columns, "spread"), rows)


def rounded(columns: tuple[str, ...], rows: Sequence[Sequence[float]]) -> Sweep:
    """A Sweep of four digits for what was measured; whole numbers stay whole."""
    kept = tuple(
        tuple(float(v) if isinstance(v, int) else float(f"{v:.4g}") for v in row) for row in rows
    )
    return Sweep(columns=columns, rows=kept)
