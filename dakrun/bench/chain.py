"""The time of a launch in a long chain of launches, in a CUDA graph.

Knows neither what is launched nor what it reads.
"""

import math
import statistics
from collections.abc import Callable

from dakrun.probe.costs import graph_seconds

LEAST_SECONDS = 4e-3  # of a graph: where it begins and ends then counts for about 0.1%


def launch_seconds(launch: Callable[[int], object], operands: int, *, replays: int) -> list[float]:
    """Seconds of a launch in each replay of a chain of them.

    `launch(operand)` puts a launch on the current stream, with one of `operands`. All have their
    turns, as often as it takes for LEAST_SECONDS.
    """

    def chain(rounds: int) -> Callable[[], None]:
        def launches() -> None:
            for number in range(rounds * operands):
                launch(number % operands)

        return launches

    once = statistics.median(graph_seconds(chain(1), 2))
    rounds = math.ceil(LEAST_SECONDS / once)
    return [seconds / (rounds * operands) for seconds in graph_seconds(chain(rounds), replays)]
