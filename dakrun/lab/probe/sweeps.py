"""The sweeps of `dakrun profile` on a GPU: bandwidths of tiers, chains of reads, cuBLAS.

Each returns a Sweep of medians, or the samples of one figure. Knows buffers, not profiles.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dakrun.hardware import Card, Sweep
from dakrun.kernels import Reader, Window, read_multicast, read_once, read_window
from dakrun.kernels.runtime import copy
from dakrun.lab.probe.chain import graph_seconds
from dakrun.lab.probe.measurement import (
    KIB,
    QUICK,
    Effort,
    Ring,
    fitting,
    ring_for,
    spread,
    steadier,
)

MAX_CHAIN_OPS = 128


@dataclass(frozen=True)
class Buffer:
    """Memory that the GPU can read: `tensor` is uint8 [bytes] in any tier."""

    tensor: torch.Tensor

    def reader(self, ctas: int, ring: Ring, sharers: int = 1, nbytes: int = 0) -> Reader:
        """`ctas` CTAs that read the buffer, or its first `nbytes`."""
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
    """The GPU under test: its card, a buffer in HBM, and the effort."""

    card: Card
    hbm: Buffer
    effort: Effort

    @property
    def sms(self) -> int:
        """The card's SMs."""
        return self.card.sms

    def readings(self, *readers: Reader) -> list[list[float]]:
        """Bytes/s of each reader in each run, with all of them reading at once."""
        runs = [read_window(readers, self.effort.seconds) for _ in range(self.effort.runs)]
        return [list(rates) for rates in zip(*runs, strict=True)]

    def repeat(self, sample: Callable[[], float]) -> list[float]:
        """One sample per run."""
        return [sample() for _ in range(self.effort.runs)]

    def alone(self, reader: Reader) -> list[float]:
        """Bytes/s of one reader in each run."""
        return self.readings(reader)[0]


def hbm_sweep(bench: Bench) -> Sweep:
    """HBM alone by CTAs (one per SM), chunk and stages."""
    counts = (bench.sms,) if bench.effort is QUICK else (bench.sms, bench.sms * 9 // 10, 64)
    points = [
        (ctas, *ring) for ctas in counts for ring in fitting(bench.effort.hbm_rings, bench.card)
    ]
    return _sweep(
        ("ctas", "chunk_bytes", "stages", "bytes_per_s"),
        points,
        lambda ctas, chunk, stages: bench.alone(bench.hbm.reader(ctas, (chunk, stages))),
    )


def l2_sweep(bench: Bench) -> Sweep:
    """Repeated reads of a working set, by its bytes: below and above the size of L2."""
    return _sweep(
        ("set_bytes", "bytes_per_s"),
        [(size,) for size in bench.effort.l2_bytes],
        lambda size: bench.alone(bench.hbm.reader(bench.sms, (8 * KIB, 8), nbytes=size)),
    )


def direct_sweep(bench: Bench, remote: Buffer) -> Sweep:
    """A remote tier alone by SMs, chunk and stages."""
    counts = sorted({*bench.effort.sms, bench.sms})
    points = [
        (sms, *ring) for sms in counts for ring in fitting(bench.effort.remote_rings, bench.card)
    ]
    return _sweep(
        ("sms", "chunk_bytes", "stages", "bytes_per_s"),
        points,
        lambda sms, chunk, stages: bench.alone(remote.reader(sms, (chunk, stages))),
    )


def congestion_sweep(bench: Bench, remote: Buffer, hbm_ring: Ring) -> Sweep:
    """A remote tier and HBM read at once, by SMs and bytes in flight of the remote tier."""
    rows = []
    for window in bench.effort.windows:
        for sms in bench.effort.sms:
            ring = ring_for(window // sms, bench.card)
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
    """Bytes/s into shared memory when several SMs read the same chunks of a remote tier."""
    ctas = 64 if bench.sms >= 64 else bench.sms // 8 * 8
    return _sweep(
        ("readers", "delivered_bytes_per_s"),
        [(1,), (2,), (4,), (8,)],
        lambda sharers: bench.alone(remote.reader(ctas, (8 * KIB, 8), sharers=sharers)),
    )


def multicast_sweep(bench: Bench, remote: Buffer, link_rate: float) -> Sweep:
    """Multicast to clusters of 2, 4 and 8: bytes/s over the link and into shared memory."""
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


def copy_rates(bench: Bench, to: torch.Tensor, source: torch.Tensor) -> list[float]:
    """Bytes/s of the copy engine from `source` to `to`, tensors of equal size."""
    copy_seconds(to, source)
    return [source.numel() / copy_seconds(to, source) for _ in range(bench.effort.runs)]


def copy_seconds(to: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of one asynchronous copy."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    copy(to, source)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def staging_rates(
    bench: Bench, to: torch.Tensor, source: torch.Tensor, alone: float, hbm_ring: Ring
) -> tuple[list[float], list[float]]:
    """Bytes/s of (copies, HBM reads) while the copy engine writes to HBM and all SMs read it.

    `alone` is the copy engine's rate without the reads.
    """
    copied, read = [], []
    stream = torch.cuda.Stream()
    seconds = max(bench.effort.seconds, 0.02)
    rounds = max(1, round(seconds * alone / source.numel()))
    for _ in range(bench.effort.runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(rounds):
                copy(to, source)
            end.record()
        copying = rounds * source.numel() / alone
        window = Window([bench.hbm.reader(bench.sms, hbm_ring)], 0.9 * copying)
        read += window.rates()
        end.synchronize()
        copied.append(rounds * source.numel() / (float(start.elapsed_time(end)) * 1e-3))
    return copied, read


def chain_sweep(bench: Bench) -> Sweep:
    """Chains of dependent ops in a CUDA graph by bytes of an op, with and without PDL.

    The ops only read. The column "overlap" is 1 with programmatic dependent launch.
    """
    points = [(size, pdl) for size in bench.effort.op_bytes for pdl in (0, 1)]
    rows = []
    for size, pdl in points:
        total = bench.hbm.tensor.numel()
        addresses = [bench.hbm.tensor.data_ptr() + at for at in range(0, total - size + 1, size)]
        seconds = _chain_seconds(bench, addresses[:MAX_CHAIN_OPS], size, bool(pdl))
        op = statistics.median(seconds)
        rows.append((size, pdl, op, size / op, spread(seconds)))
    return rounded(("op_bytes", "overlap", "op_s", "bytes_per_s", "spread"), rows)


def empty_launch_seconds(bench: Bench, *, pdl: bool) -> list[float]:
    """Seconds of an empty kernel in a CUDA graph of many."""
    return _chain_seconds(bench, [bench.hbm.tensor.data_ptr()] * 256, 0, pdl)


def _chain_seconds(bench: Bench, addresses: Sequence[int], size: int, pdl: bool) -> list[float]:
    """Seconds of one op of a chain that reads `size` bytes at each of `addresses`."""
    sink = torch.zeros(bench.sms, dtype=torch.int32, device="cuda")

    def launch() -> None:
        for address in addresses:
            read_once(address, size, ctas=bench.sms, chunk=16 * KIB, stages=6, sink=sink, pdl=pdl)

    return [seconds / len(addresses) for seconds in graph_seconds(launch, bench.effort.runs)]


def matmul_rates(bench: Bench, dtype: torch.dtype, n: int) -> list[float]:
    """FLOP/s of cuBLAS for `n` rows: the faster of a weight that fits L2 and a larger one.

    The planner counts the weight's bytes separately, so the figure should be that of arithmetic.
    """
    best: list[float] = []
    for size in (4096, 8192):
        weight = torch.randn(size, size, device="cuda", dtype=dtype)
        x = torch.randn(n, size, device="cuda", dtype=dtype)

        def launch(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            for _ in range(8):
                torch.nn.functional.linear(x, weight)

        flops = 8 * 2.0 * n * size * size
        rates = [flops / seconds for seconds in graph_seconds(launch, bench.effort.runs)]
        if not best or statistics.median(rates) > statistics.median(best):
            best = rates
    return best


def _sweep(
    columns: tuple[str, ...],
    points: Sequence[tuple[int, ...]],
    samples: Callable[..., list[float]],
) -> Sweep:
    """Median and spread of `samples` at every point; unsteady points are measured once more."""
    rows = []
    for point in points:
        values = steadier(lambda point=point: samples(*point))  # type: ignore[misc]
        rows.append((*point, statistics.median(values), spread(values)))
    return rounded((*columns, "spread"), rows)


def rounded(columns: tuple[str, ...], rows: Sequence[Sequence[float]]) -> Sweep:
    """A Sweep with floats rounded to four digits; integers are exact."""
    kept = tuple(
        tuple(float(v) if isinstance(v, int) else float(f"{v:.4g}") for v in row) for row in rows
    )
    return Sweep(columns=columns, rows=kept)
