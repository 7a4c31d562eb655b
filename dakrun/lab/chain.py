"""Chains of launches in CUDA graphs, and the time of one launch.

Knows neither the kernel nor its operands.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from dakrun.kernels.runtime import capture
from dakrun.lab.samples import steadier

MIN_SECONDS = 4e-3  # minimum time of a chain; the graph's own start and end are about 0.1% of it
LOAD_SECONDS = 0.4  # until the clocks have settled at the power limit

Launch = Callable[[int], object]  # launches with the operand of that number


def recorded(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `launch`, whose kernels are loaded already."""
    return capture(launch, torch.cuda.graph_pool_handle())


def graph_seconds(launch: Callable[[], None], runs: int, *, new: bool = True) -> list[float]:
    """Seconds of a CUDA graph of `launch` in each of `runs` replays, after as many to warm up.

    If its kernels may be `new`, a launch loads them first. Unsteady samples are measured once more.
    """
    if new:
        launch()
        torch.cuda.synchronize()
    graph = recorded(launch)

    def samples() -> list[float]:
        return [event_seconds(graph.replay) for _ in range(runs)]

    samples()
    return list(steadier(samples))


def launch_seconds(launch: Launch, operands: int, *, replays: int) -> list[float]:
    """Seconds of one launch in each of `replays` of a chain.

    The chain cycles through its `operands` until it takes MIN_SECONDS.
    """
    length = _length(launch, operands)
    seconds = graph_seconds(_chain(launch, operands, length), replays, new=False)
    return [chain / length for chain in seconds]


def seconds_round_robin(
    chains: Sequence[tuple[Launch, int]], *, replays: int, load: bool
) -> list[list[float]]:
    """Seconds of one launch of each chain (launch, operands), in each of `replays` rounds.

    A round replays every chain once, so that changing clocks affect all of them alike. With `load`,
    rounds first run for LOAD_SECONDS.
    """
    graphs = [(recorded(_chain(*chain, n)), n) for chain in chains for n in [_length(*chain)]]

    def one_round() -> list[float]:
        return [event_seconds(graph.replay) / length for graph, length in graphs]

    start = time.perf_counter()
    one_round()
    while load and time.perf_counter() - start < LOAD_SECONDS:
        one_round()
    return [list(times) for times in zip(*(one_round() for _ in range(replays)), strict=True)]


def _length(launch: Launch, operands: int) -> int:
    """Launches of a chain of at least MIN_SECONDS that repeats all operands equally often."""
    once = statistics.median(graph_seconds(_chain(launch, operands, operands), 2))
    return operands * math.ceil(MIN_SECONDS / once)


def event_seconds(launch: Callable[[], object]) -> float:
    """Seconds that the GPU takes for what `launch` puts on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _chain(launch: Launch, operands: int, length: int) -> Callable[[], None]:
    def launches() -> None:
        for number in range(length):
            launch(number % operands)

    return launches
