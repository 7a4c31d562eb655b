"""CUDA graphs and their times: of a launch in a long chain of them.

Knows neither what is launched nor what it reads.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from dakrun.probe.measurement import steadier

LEAST_SECONDS = 4e-3  # of a graph: where it begins and ends then counts for about 0.1%
LOAD_SECONDS = 0.4  # after which a GPU runs as fast as its power allows for long

Launch = Callable[[int], object]  # puts a launch with one of some operands on the current stream


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `launch` puts on the current stream, which it first does once."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def graph_seconds(launch: Callable[[], None], runs: int) -> list[float]:
    """Seconds of what `launch` puts into a CUDA graph, replayed `runs` times."""
    graph = captured(launch)

    def samples() -> list[float]:
        return [_replayed(graph) for _ in range(runs)]

    samples()
    return list(steadier(samples))


def launch_seconds(launch: Launch, operands: int, *, replays: int) -> list[float]:
    """Seconds of a launch in each replay of a chain of them.

    All `operands` have their turns, as often as it takes for LEAST_SECONDS.
    """
    once = statistics.median(graph_seconds(_chain(launch, operands, operands), 2))
    length = operands * math.ceil(LEAST_SECONDS / once)
    graph = _chain(launch, operands, length)
    return [seconds / length for seconds in graph_seconds(graph, replays)]


def sustained_seconds(chains: Sequence[tuple[Launch, int]], *, replays: int) -> list[list[float]]:
    """Seconds of a launch of each of `chains` of (launch, operands), in each replay, under load.

    They have their turns, first until the GPU has been at work for LOAD_SECONDS.
    """
    graphs, lengths = [], []
    for launch, operands in chains:
        once = statistics.median(graph_seconds(_chain(launch, operands, operands), 2))
        lengths.append(operands * math.ceil(LEAST_SECONDS / once))
        graphs.append(captured(_chain(launch, operands, lengths[-1])))

    def round_seconds() -> list[float]:
        times = [_replayed(graph) for graph in graphs]
        return [seconds / length for seconds, length in zip(times, lengths, strict=True)]

    start = time.perf_counter()
    while time.perf_counter() - start < LOAD_SECONDS:
        round_seconds()
    return [list(times) for times in zip(*(round_seconds() for _ in range(replays)), strict=True)]


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _chain(launch: Launch, operands: int, length: int) -> Callable[[], None]:
    def launches() -> None:
        for number in range(length):
            launch(number % operands)

    return launches
