"""A run over several machines: each one's plan, its part of the rows, and the time of the whole.

Knows profiles and lengths; knows neither Ray nor files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dakrun.errors import CannotRun, UsageError
from dakrun.plan.expected_run import ExpectedRun
from dakrun.plan.plan import Plan
from dakrun.plan.run_time import RunForecast

MAX_NODES = 10_000
BALANCING = 8  # iterations that even out the machines' times


@dataclass(frozen=True)
class NodeCount:
    """`count` machines of the profile called `name`, one worker each."""

    name: str
    count: int


def parse_nodes(text: str) -> list[NodeCount]:
    """The machines in a text like "h200-pcie5:4,rtx-pro-6000:8". Raises UsageError."""
    counts = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = count, "1"
        if not name or not count.isdecimal() or not 1 <= int(count) <= MAX_NODES:
            raise UsageError(
                f"--nodes has {part.strip()!r}",
                hint="give profiles and how many of each, like h200-pcie5:4,rtx-pro-6000:8",
            )
        counts.append(NodeCount(name, int(count)))
    return counts


@dataclass(frozen=True)
class NodeForecast:
    """Machines of one kind in a run: the plan of each, and the run of one that has most `rows`."""

    nodes: NodeCount
    plan: Plan
    rows: int
    run: RunForecast | None

    @property
    def seconds(self) -> float:
        """Time that its rows take; 0 if it has none."""
        return self.run.seconds if self.run else 0.0


@dataclass(frozen=True)
class ClusterForecast:
    """The predicted run of a file on several kinds of machines; it ends when the last row does.

    `new_tokens` are those of all rows, at most.
    """

    kinds: tuple[NodeForecast, ...]
    new_tokens: int

    @property
    def seconds(self) -> float:
        """Time from the first step to the last."""
        return max(kind.seconds for kind in self.kinds)

    def __str__(self) -> str:
        rate = self.new_tokens / self.seconds if self.seconds else 0.0
        count = sum(kind.nodes.count for kind in self.kinds)
        machines = "machine" if count == 1 else "machines"
        return f"predicted {self.seconds:.1f} s on {count} {machines}, {rate:,.0f} new tokens/s"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with units in the names."""
        return {
            "seconds": self.seconds,
            "new_tokens": self.new_tokens,
            "nodes": [
                {
                    "profile": kind.nodes.name,
                    "why_no_kernels": kind.plan.why_no_kernels,
                    "count": kind.nodes.count,
                    "batch_size": kind.plan.workload.batch_size,
                    "offload_ratio": kind.plan.ratio,
                    "rows_each": kind.rows,
                    "seconds": kind.seconds,
                    "run": vars(kind.run) if kind.run else None,
                }
                for kind in self.kinds
            ],
        }


def foretell_cluster(
    machines: Sequence[NodeCount],
    plan_of: Callable[[str, ExpectedRun], Plan],
    whole: ExpectedRun,
    note: Callable[[str], None],
) -> ClusterForecast:
    """The run of `whole` on `machines`.

    `plan_of(profile, run)` plans for a machine with such a part of it. Each machine runs a part of
    the rows, spread over the file; parts are changed until all take about the same time.
    `note` takes a line about machines that cannot run the model, which get none; raises CannotRun
    if none can.
    """
    total = sum(nodes.count for nodes in machines)
    able: list[tuple[NodeCount, Plan]] = []
    problem: CannotRun | None = None
    for nodes in machines:
        try:
            able.append((nodes, plan_of(nodes.name, whole.part(1 / total))))
        except CannotRun as refusal:
            problem = refusal
            note(f"{nodes.name} is left out: {refusal}")
    if problem is not None and not able:
        raise problem
    count = sum(nodes.count for nodes, _ in able)
    parts = [1 / count] * len(able)  # of the rows, of one machine of each kind
    best: ClusterForecast | None = None
    for _ in range(BALANCING):
        kinds = []
        for (nodes, plan), part in zip(able, parts, strict=True):
            own = whole.part(part)
            run = own.forecast(plan) if own.rows else None
            kinds.append(NodeForecast(nodes, plan, round(len(own.rows) / own.share), run))
        found_now = ClusterForecast(tuple(kinds), round(whole.mean_new * whole.requests))
        if best is None or found_now.seconds < best.seconds:
            best = found_now
        speeds = [
            part / kind.seconds if kind.seconds else part / found_now.seconds
            for part, kind in zip(parts, kinds, strict=True)
        ]
        all_s = sum(speed * nodes.count for speed, (nodes, _) in zip(speeds, able, strict=True))
        parts = [speed / all_s for speed in speeds]
    assert best is not None
    return best
