"""The time of a launch in a long chain of launches, in a CUDA graph, perhaps beside another chain.

Knows neither what is launched nor what it reads.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dakrun.probe.costs import captured, graph_seconds

LEAST_SECONDS = 4e-3  # of a graph: where it begins and ends then counts for about 0.1%

Launch = Callable[[int], object]  # puts a launch with one of some operands on the current stream


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
