"""What ops cost on a GPU at least: launches that only read in a CUDA graph, arithmetic of cuBLAS.

Knows buffers, not profiles.
"""

import statistics
from collections.abc import Sequence

import torch

from dakrun.hardware.profile import Sweep
from dakrun.kernels.bandwidth import read_once
from dakrun.probe.chain import graph_seconds
from dakrun.probe.effort import KIB
from dakrun.probe.measurement import spread
from dakrun.probe.sweeps import Bench, rounded

CHAIN_OPS = 128  # at most


def chain_sweep(bench: Bench) -> Sweep:
    """Chains of dependent ops in a CUDA graph, with and without overlapping launches."""
    points = [(size, pdl) for size in bench.effort.op_bytes for pdl in (0, 1)]
    rows = []
    for size, pdl in points:
        total = bench.hbm.tensor.numel()
        addresses = [bench.hbm.tensor.data_ptr() + at for at in range(0, total - size + 1, size)]
        seconds = _chain_seconds(bench, addresses[:CHAIN_OPS], size, bool(pdl))
        op = statistics.median(seconds)
        rows.append((size, pdl, op, size / op, spread(seconds)))
    return rounded(("op_bytes", "overlap", "op_s", "bytes_per_s", "spread"), rows)


def empty_launch_seconds(bench: Bench, *, pdl: bool) -> list[float]:
    """Seconds of a kernel that does nothing, in a graph of many."""
    return _chain_seconds(bench, [bench.hbm.tensor.data_ptr()] * 256, 0, pdl)


def _chain_seconds(bench: Bench, addresses: Sequence[int], size: int, pdl: bool) -> list[float]:
    """Seconds of each op of a chain that reads `size` bytes at each of `addresses`."""
    sink = torch.zeros(bench.sms, dtype=torch.int32, device="cuda")

    def launch() -> None:
        for address in addresses:
            read_once(address, size, ctas=bench.sms, chunk=16 * KIB, stages=6, sink=sink, pdl=pdl)

    return [seconds / len(addresses) for seconds in graph_seconds(launch, bench.effort.runs)]


def matmul_rates(bench: Bench, dtype: torch.dtype, n: int) -> list[float]:
    """FLOP/s of cuBLAS for `n` rows, with a weight that L2 keeps or one that hides its reading.

    What a small batch's arithmetic costs is asked for, not what its weight's bytes cost: those
    the planner counts by bandwidth. The faster of the two weights counts.
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
