"""CUDA graphs and their times: of a launch in a long chain of them, perhaps beside another chain.

Knows neither what is launched nor what it reads.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dakrun.probe.measurement import steadier

LEAST_SECONDS = 4e-3  # of a graph: where it begins and ends then counts for about 0.1%

Launch = Callable[[int], object]  # puts a launch with one of some operands on the current stream


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `launch` puts on the current stream, which it first does once."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def graph_seconds(
    launch: Callable[[], None],
    runs: int,
    *,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[float]:
    """Seconds of what `launch` puts into a CUDA graph, replayed `runs` times, within `beside`."""
    graph = captured(launch)

    def samples() -> list[float]:
        found = []
        for _ in range(runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with beside():
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
            found.append(float(start.elapsed_time(end)) * 1e-3)
        return found

    samples()
    return list(steadier(samples))


def launch_seconds(
    launch: Launch,
    operands: int,
    *,
    replays: int,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[float]:
    """Seconds of a launch in each replay of a chain of them, all replayed within `beside`.

    All `operands` have their turns, as often as it takes for LEAST_SECONDS.
    """
    once = statistics.median(graph_seconds(_chain(launch, operands, operands), 2, beside=beside))
    length = operands * math.ceil(LEAST_SECONDS / once)
    graph = _chain(launch, operands, length)
    return [seconds / length for seconds in graph_seconds(graph, replays, beside=beside)]


class Background:
    """A chain of launches on a stream of its own, under way while others are timed."""

    def __init__(self, launch: Launch, operands: int, *, length: int) -> None:
        self._launches = _chain(launch, operands, length)  # which keep what the graph reads
        self._graph = captured(self._launches)
        self._stream = torch.cuda.Stream()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Starts it ahead of what the block launches; waits for its end.

        Raises RuntimeError where what the block waited for ended later than the chain.
        """
        started, ended = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            started.record()
            self._graph.replay()
            ended.record()
        torch.cuda.current_stream().wait_event(started)
        yield
        if ended.query():
            raise RuntimeError("the launches beside those that were timed ended too soon")
        ended.synchronize()


def _chain(launch: Launch, operands: int, length: int) -> Callable[[], None]:
    def launches() -> None:
        for number in range(length):
            launch(number % operands)

    return launches
