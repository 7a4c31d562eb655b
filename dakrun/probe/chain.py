"""CUDA graphs and their times: of a launch in a long chain of them.

Knows neither what is launched nor what it reads.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from dakrun.probe.measurement import steadier

MIN_SECONDS = 4e-3  # of a graph: where it begins and ends then counts for about 0.1%
LOAD_SECONDS = 0.4  # after which a GPU runs as fast as its power allows for long

Launch = Callable[[int], object]  # puts a launch with one of some operands on the current stream


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `launch` puts on the current stream, which it first does once."""
    launch()
    torch.cuda.synchronize()
    return recorded(launch)


def recorded(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The same of what has been launched before: its kernels are loaded, what it needs is there."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def graph_seconds(launch: Callable[[], None], runs: int, *, new: bool = True) -> list[float]:
    """Seconds of what `launch` puts into a CUDA graph, replayed `runs` times.

    It is `new` unless it has been launched before.
    """
    graph = captured(launch) if new else recorded(launch)

    def samples() -> list[float]:
        return [_replayed(graph) for _ in range(runs)]

    samples()
    return list(steadier(samples))


def launch_seconds(launch: Launch, operands: int, *, replays: int) -> list[float]:
    """Seconds of a launch in each replay of a chain of them.

    All `operands` have their turns, as often as it takes for MIN_SECONDS.
    """
    length = _length(launch, operands)
    seconds = graph_seconds(_chain(launch, operands, length), replays, new=False)
    return [chain / length for chain in seconds]


def seconds_in_turns(
    chains: Sequence[tuple[Launch, int]], *, replays: int, load: bool
) -> list[list[float]]:
    """Seconds of a launch of each of `chains` of (launch, operands), in each replay.

    The chains have their turns, so that clocks that change do for all of them. Under `load` they
    are first replayed until the GPU has been at work for LOAD_SECONDS.
    """
    lengths = [_length(*chain) for chain in chains]
    graphs = [
        recorded(_chain(*chain, length)) for chain, length in zip(chains, lengths, strict=True)
    ]

    def a_turn() -> list[float]:
        times = [_replayed(graph) for graph in graphs]
        return [seconds / length for seconds, length in zip(times, lengths, strict=True)]

    start = time.perf_counter()
    a_turn()
    while load and time.perf_counter() - start < LOAD_SECONDS:
        a_turn()
    return [list(times) for times in zip(*(a_turn() for _ in range(replays)), strict=True)]


def _length(launch: Launch, operands: int) -> int:
    """Launches of a chain of MIN_SECONDS in which all operands have as many turns."""
    once = statistics.median(graph_seconds(_chain(launch, operands, operands), 2))
    return operands * math.ceil(MIN_SECONDS / once)


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
