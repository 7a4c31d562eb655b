"""Rows handed to workers and results taken from them, whatever dies meanwhile.

Knows workers as Ray actors and rows by number; knows neither files nor models.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from dakrun.errors import CannotRun
from dakrun.ray.model_thread import Row
from dakrun.ray.worker import NONE_YET, Failed, Finished, Loaded, Progress, Reply

MAX_DEATHS = 3  # of a worker and those in its place, with no row finished between them
ROWS_AHEAD = 16  # that a worker has at least beyond its slots
WAIT_S = 1.0  # for the next call to end
REPORT_S = 60.0  # for a worker's report
WAITING_S = 30.0  # after which a note says that Ray has no room for workers


class Rows(Protocol):
    """The rows to do, in the order in which they should begin."""

    def __iter__(self) -> Iterator[Row]: ...
    def left(self) -> int | None:
        """How many have not been taken, or fewer; None if there are too many to know."""


@dataclass(eq=False)
class Member:
    """A worker as the dispatcher sees it. `rows` are those that it has, by number."""

    name: str
    actor: Any
    node: str = ""  # once Ray has found room for it
    loaded: Loaded | None = None
    started: float = 0.0
    finished: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    progress: Progress = NONE_YET

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second so far; as planned before there are some, 0 before a plan."""
        busy = time.perf_counter() - self.started
        if self.progress.new_tokens and busy > 1:
            return self.progress.new_tokens / busy
        return self.loaded.tokens_per_s if self.loaded else 0.0

    def __str__(self) -> str:
        return f"{self.name} on {self.node}" if self.node else self.name


class Dispatcher:
    """Computes rows with `count` workers.

    `start` makes one; it takes the number of workers that are to share the memory that is free now.
    `on_finished` takes rows with their results as they come, `on_progress` the workers after each
    turn, and `note` a line for people. A worker holds up to twice its slots + 16 rows; near the end
    of the input no more than its share, by tokens/s, of the unfinished ones, so that all end
    together. If one dies, others do its rows again, and a new worker takes its place. One that
    cannot run the model, or keeps dying, is left out, with a note.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        count: int,
        *,
        on_finished: Callable[[list[tuple[Row, Finished]]], None],
        on_progress: Callable[[Sequence[Member]], None],
        note: Callable[[str], None],
    ) -> None:
        self._start, self._on_finished = start, on_finished
        self._on_progress, self._note = on_progress, note
        self._to_redo: list[Row] = []  # of workers that have died; a heap
        self._calls: dict[Any, tuple[Member, Callable[[Member, Any], None]]] = {}  # under way
        self._deaths: Counter[str] = Counter()  # by the worker's name
        self.began = 0.0  # time at which the first worker had its first rows
        self._late: float | None = None  # when to say that some workers wait
        self._count = count
        self.members: list[Member] = []

    def run(self, rows: Rows) -> None:
        """Start the workers, if there are rows, and do all. Raises CannotRun if no worker can."""
        source = iter(rows)
        next_row = next(source, None)
        if next_row is None:
            return
        self._late = time.perf_counter() + WAITING_S
        for number in range(self._count):
            self._add(f"worker {number + 1}", self._count)
        while True:
            for member in [m for m in self.members if m.loaded and not self._is_called(m)]:
                left = rows.left()
                room = self._room(member, None if left is None else left + (next_row is not None))
                batch = [heappop(self._to_redo) for _ in self._to_redo[:room]]
                for _ in range(room - len(batch)):
                    if next_row is None:
                        break
                    batch.append(next_row)
                    next_row = next(source, None)
                if batch or member.rows:
                    self._hand_over(member, batch)
            if next_row is None and not self._to_redo and not any(m.rows for m in self.members):
                return
            self._take_turn()

    def reports(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """The report of each worker that has finished rows."""
        asked = [(m, m.actor.report.remote()) for m in self.members if m.finished]
        for member, report in asked:
            with suppress(RayError):
                yield member, ray.get(report, timeout=REPORT_S)

    def close(self) -> None:
        """End the workers, whatever they do; their processes' memory is free then."""
        for member in self.members:
            ray.kill(member.actor)
        self.members = []

    def _add(self, name: str, loading: int) -> None:
        """Start a worker; `loading` workers, it included, have yet to take their memory."""
        member = Member(name, self._start(loading))
        self.members.append(member)
        self._calls[member.actor.node.remote()] = member, self._on_node

    def _is_called(self, member: Member) -> bool:
        return any(member is called for called, _ in self._calls.values())

    def _room(self, member: Member, left: int | None) -> int:
        """How many more rows `member` should have, with `left` that no worker had yet."""
        assert member.loaded is not None
        most = 2 * member.loaded.slots + ROWS_AHEAD
        if left is not None:
            unfinished = left + len(self._to_redo) + sum(len(m.rows) for m in self.members)
            speeds = [m.tokens_per_s or member.tokens_per_s for m in self.members if m.node]
            part = member.tokens_per_s / sum(speeds)
            most = min(most, math.ceil(unfinished * part))
        return max(0, most - len(member.rows))

    def _hand_over(self, member: Member, batch: list[Row]) -> None:
        member.started = member.started or time.perf_counter()
        self.began = self.began or member.started
        member.rows |= {row.number: (row, data) for row, data in batch}
        self._calls[member.actor.exchange.remote(batch)] = member, self._on_reply

    def _take_turn(self) -> None:
        """Wait for a call to end, and see to it."""
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=WAIT_S)
        for call in done:
            member, on_done = self._calls.pop(call)
            try:
                found = ray.get(call)
            except RayTaskError as problem:
                raise RuntimeError(f"{member}: {problem.cause!r}") from problem
            except RayError as problem:
                self._replace(member, str(problem).strip().splitlines()[0])
            else:
                on_done(member, found)
        self._tell_who_waits()
        self._on_progress(self.members)

    def _on_node(self, member: Member, name: str) -> None:
        member.node = name
        self._calls[member.actor.load.remote()] = member, self._on_load

    def _on_load(self, member: Member, found: Loaded | Failed) -> None:
        if isinstance(found, Loaded):
            member.loaded = found
            return
        self._leave_out(
            member,
            f"{found.message}; {found.hint}",
            CannotRun(f"no worker can run the model: {found.message}", hint=found.hint),
            found.exit_code,
        )

    def _leave_out(self, member: Member, reason: str, problem: CannotRun, code: int) -> None:
        """Go on without `member`; raise `problem`, with its exit code, if there is no other."""
        self._note(f"{member} is left out: {reason}")
        self._remove(member)
        if not self.members:
            problem.exit_code = code
            raise problem

    def _on_reply(self, member: Member, reply: Reply) -> None:
        member.progress = reply.progress
        if reply.finished:
            del self._deaths[member.name]
            member.finished += len(reply.finished)
            self._on_finished([(member.rows.pop(one.number), one) for one in reply.finished])
        if reply.failed:
            self._replace(member, f"{reply.failed.message}; {reply.failed.hint}")

    def _replace(self, member: Member, reason: str) -> None:
        """Let others do the rows of `member`, which has ended, and a new worker take its place."""
        for row in member.rows.values():
            heappush(self._to_redo, row)
        self._deaths[member.name] += 1
        if self._deaths[member.name] < MAX_DEATHS:
            self._note(f"{member} has ended, and its rows are done again: {reason}")
            self._remove(member)
            self._add(member.name, 1 + sum(not other.loaded for other in self.members))
            return
        times = f"has ended {MAX_DEATHS} times with no row finished between"
        problem = CannotRun(
            f"every worker has ended; the last, {member}, {times}: {reason}",
            hint="finished rows are kept; Ray's logs say more",
        )
        self._leave_out(member, f"it {times}: {reason}", problem, problem.exit_code)

    def _remove(self, member: Member) -> None:
        self.members.remove(member)
        self._calls = {call: (of, f) for call, (of, f) in self._calls.items() if of is not member}
        ray.kill(member.actor)

    def _tell_who_waits(self) -> None:
        """Say once that Ray has no room for some workers."""
        if self._late is None or time.perf_counter() < self._late:
            return
        self._late = None
        if waiting := sum(not member.node for member in self.members):
            self._note(f"{waiting} of {len(self.members)} workers wait for room in the cluster")
