"""The sweeps of `dakrun profile` on a GPU: bandwidths of tiers, chains of reads, cuBLAS.

Each returns a Sweep of medians, or the samples of one figure. Knows buffers, uint8 [bytes], not
profiles.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dakrun.hardware import Card, Sweep
from dakrun.kernels import Reader, Window, read_multicast, read_once
from dakrun.kernels.runtime import copy
from dakrun.lab.ceilings import KIB, Ring, fitting, ring_for
from dakrun.lab.chain import graph_seconds
from dakrun.lab.memory import copy_seconds, read_rates, reader
from dakrun.lab.probe.effort import Effort
from dakrun.lab.samples import spread, steadier

MAX_CHAIN_OPS = 128
TOTAL_SPREAD = 0.05  # of a point of the grid that is measured once more


@dataclass(frozen=True)
class Bench:
    """The GPU under test: its card, a buffer in HBM, and the effort."""

    card: Card
    hbm: torch.Tensor
    effort: Effort

    @property
    def sms(self) -> int:
        """The card's SMs."""
        return self.card.sms

    def readings(self, *readers: Reader) -> list[list[float]]:
        """Bytes/s of each reader in each run, with all of them reading at once."""
        return read_rates(readers, self.effort.seconds, self.effort.runs)

    def alone(self, reader: Reader) -> list[float]:
        """Bytes/s of one reader in each run."""
        return self.readings(reader)[0]

    def reads(
        self, columns: Sequence[str], points: Sequence[Sequence[int]], read: Callable[..., Reader]
    ) -> Sweep:
        """Rates of the readers that `read` makes of points, alone; unsteady ones once more."""
        rows = []
        for point in points:
            values = steadier(partial(self.alone, read(*point)))
            rows.append((*point, statistics.median(values), spread(values)))
        return rounded((*columns, "spread"), rows)

    def rings(self, counts: Sequence[int], rings: Sequence[Ring]) -> list[tuple[int, int, int]]:
        """Points (CTAs, chunk, stages): every count with every ring that fits."""
        return [(ctas, *ring) for ctas in counts for ring in fitting(rings, self.card)]


def congestion_sweep(bench: Bench, remote: torch.Tensor, hbm_ring: Ring) -> Sweep:
    """A remote tier and HBM read at once, by SMs and bytes in flight of the remote tier."""
    rows = []
    for window in bench.effort.windows:
        for sms in bench.effort.sms:
            ring = ring_for(window // sms, bench.card)
            if ring is None or sms >= bench.sms:
                continue
            both = reader(remote, sms, ring), reader(bench.hbm, bench.sms - sms, hbm_ring)
            for _ in range(2):
                far, near = bench.readings(*both)
                scatter = spread([a + b for a, b in zip(far, near, strict=True)])
                if scatter <= TOTAL_SPREAD:
                    break
            rows.append((sms, window, statistics.median(far), statistics.median(near), scatter))
    columns = ("sms", "in_flight_bytes", "remote_bytes_per_s", "hbm_bytes_per_s", "spread")
    return rounded(columns, rows)


def multicast_sweep(bench: Bench, remote: torch.Tensor, link_rate: float) -> Sweep:
    """Multicast to clusters of 2, 4 and 8: bytes/s over the link and into shared memory."""
    chunk, stages, ctas = 16 * KIB, 4, 64
    rows = []
    for size in (2, 4, 8):
        clusters = ctas // size
        chunks = max(stages, round(link_rate * bench.effort.seconds / (chunk * clusters)))
        read = partial(
            read_multicast, remote.data_ptr(), remote.numel(), clusters=clusters, size=size,
            chunk=chunk, stages=stages, chunks=chunks,
        )  # fmt: skip
        read()
        rates = steadier(lambda read=read: [read() for _ in range(bench.effort.runs)])  # type: ignore[misc]
        link = statistics.median(rates)
        rows.append((size, link, size * link, spread(rates)))
    return rounded(("cluster", "link_bytes_per_s", "delivered_bytes_per_s", "spread"), rows)


def copy_rates(bench: Bench, to: torch.Tensor, source: torch.Tensor) -> list[float]:
    """Bytes/s of the copy engine from `source` to `to`, tensors of equal size."""
    copy_seconds(to, source)
    return [source.numel() / copy_seconds(to, source) for _ in range(bench.effort.runs)]


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
        read += Window([reader(bench.hbm, bench.sms, hbm_ring)], 0.9 * copying).rates()
        end.synchronize()
        copied.append(rounds * source.numel() / (float(start.elapsed_time(end)) * 1e-3))
    return copied, read


def chain_sweep(bench: Bench) -> Sweep:
    """Chains of dependent ops in a CUDA graph by bytes of an op, with and without PDL.

    The ops only read. The column "overlap" is 1 with programmatic dependent launch.
    """
    rows, (start, total) = [], (bench.hbm.data_ptr(), bench.hbm.numel())
    for size in bench.effort.op_bytes:
        addresses = [start + at for at in range(0, total - size + 1, size)][:MAX_CHAIN_OPS]
        for pdl in (0, 1):
            seconds = chain_seconds(bench, addresses, size, bool(pdl))
            op = statistics.median(seconds)
            rows.append((size, pdl, op, size / op, spread(seconds)))
    return rounded(("op_bytes", "overlap", "op_s", "bytes_per_s", "spread"), rows)


def chain_seconds(bench: Bench, addresses: Sequence[int], size: int, pdl: bool) -> list[float]:
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
    found = []
    for size in (4096, 8192):
        weight = torch.randn(size, size, device="cuda", dtype=dtype)
        x = torch.randn(n, size, device="cuda", dtype=dtype)

        def launch(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            for _ in range(8):
                torch.nn.functional.linear(x, weight)

        flops = 8 * 2.0 * n * size * size
        found.append([flops / seconds for seconds in graph_seconds(launch, bench.effort.runs)])
    return max(found, key=statistics.median)


def rounded(columns: Sequence[str], rows: Sequence[Sequence[float]]) -> Sweep:
    """A Sweep with floats rounded to four digits; integers are exact."""
    kept = tuple(
        tuple(float(v) if isinstance(v, int) else float(f"{v:.4g}") for v in row) for row in rows
    )
    return Sweep(columns=tuple(columns), rows=kept)
