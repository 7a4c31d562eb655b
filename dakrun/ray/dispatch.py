"""Rows handed to workers and results taken from them, whatever dies meanwhile.

Knows workers as Ray actors and rows by number; knows neither files nor models.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from dakrun.errors import CannotRun
from dakrun.ray.model_thread import Row
from dakrun.ray.worker import Failed, Finished, Loaded, Progress, Reply

MAX_DEATHS = 3  # of workers, with no row finished between them
ROWS_AHEAD = 16  # that a worker has at least beyond its slots
WAIT_S = 1.0  # for the next call to end
WAITING_S = 30.0  # after which a note says that Ray has no room for workers


class Rows(Protocol):
    """The rows to do, in the order in which they should begin."""

    def __iter__(self) -> Iterator[Row]: ...
    def left(self) -> int | None:
        """How many have not been taken; None if there are too many to know."""


NONE_YET = Progress(0, None, None)


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
    """Computes rows with `count` workers, each of which `start` makes.

    `on_finished` takes rows with their results as they come, `on_progress` the workers after each
    turn, and `note` a line for people. A worker has rows for some steps ahead, but no more than its
    part, by its speed, of those that are unfinished. If one dies, its rows are done again, and
    another takes its place. One that cannot run the model is left out, with a note.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        count: int,
        *,
        on_finished: Callable[[list[tuple[Row, Finished]]], None],
        on_progress: Callable[[Sequence[Member]], None],
        note: Callable[[str], None],
    ) -> None:
        self._start, self._on_finished = start, on_finished
        self._on_progress, self._note = on_progress, note
        self._again: list[Row] = []  # of workers that have died; a heap
        self._calls: dict[Any, tuple[Member, Callable[[Member, Any], None]]] = {}  # under way
        self._deaths = 0
        self._failed: Failed | None = None  # the last that cannot run the model
        self.began = 0.0  # time at which the first worker had its first rows
        self._late: float | None = time.perf_counter() + WAITING_S
        self.members: list[Member] = []
        for number in range(count):
            self._add(f"worker {number + 1}")

    def run(self, rows: Rows) -> None:
        """Do all rows. Raises CannotRun if no worker can, or if they keep dying."""
        source = iter(rows)
        following = next(source, None)
        while True:
            for member in [m for m in self.members if m.loaded and not self._is_called(m)]:
                left = rows.left()
                room = self._room(member, None if left is None else left + (following is not None))
                batch = [heappop(self._again) for _ in self._again[:room]]
                for _ in range(room - len(batch)):
                    if following is None:
                        break
                    batch.append(following)
                    following = next(source, None)
                if batch or member.rows:
                    self._hand_over(member, batch)
            if following is None and not self._again and not any(m.rows for m in self.members):
                return
            self._take_turn()

    def reports(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """The report of each worker that has finished rows."""
        for member in self.members:
            if member.finished:
                with suppress(RayActorError):
                    yield member, ray.get(member.actor.report.remote())

    def close(self) -> None:
        """End the workers, whatever they do; their processes' memory is free then."""
        for member in self.members:
            ray.kill(member.actor)
        self.members = []

    def _add(self, name: str) -> None:
        member = Member(name, self._start())
        self.members.append(member)
        self._calls[member.actor.node.remote()] = member, self._on_node

    def _is_called(self, member: Member) -> bool:
        return any(member is called for called, _ in self._calls.values())

    def _room(self, member: Member, left: int | None) -> int:
        """How many more rows `member` should have, with `left` that no worker had yet."""
        assert member.loaded is not None
        most = 2 * member.loaded.slots + ROWS_AHEAD
        if left is not None:
            unfinished = left + len(self._again) + sum(len(m.rows) for m in self.members)
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
            member, then = self._calls.pop(call)
            try:
                found = ray.get(call)
            except RayActorError as problem:
                self._replace(member, str(problem).strip().splitlines()[0])
            except RayTaskError as problem:
                raise RuntimeError(f"{member}: {problem.cause!r}") from problem
            else:
                then(member, found)
        self._tell_who_waits()
        self._on_progress(self.members)

    def _on_node(self, member: Member, name: str) -> None:
        member.node = name
        self._calls[member.actor.load.remote()] = member, self._on_load

    def _on_load(self, member: Member, found: Loaded | Failed) -> None:
        if isinstance(found, Loaded):
            member.loaded = found
            return
        self._note(f"{member} is left out: {found.message}; {found.hint}")
        self._failed = found
        self._remove(member)
        if not self.members:
            problem = CannotRun(f"no worker can run the model: {found.message}", hint=found.hint)
            problem.exit_code = found.exit_code
            raise problem

    def _on_reply(self, member: Member, reply: Reply) -> None:
        member.progress = reply.progress
        if reply.finished:
            self._deaths = 0
            member.finished += len(reply.finished)
            self._on_finished([(member.rows.pop(one.number), one) for one in reply.finished])
        if reply.failed:
            self._replace(member, f"{reply.failed.message}; {reply.failed.hint}")

    def _replace(self, member: Member, reason: str) -> None:
        """Let others do the rows of `member`, which has ended, and a new worker take its place."""
        for row in member.rows.values():
            heappush(self._again, row)
        self._deaths += 1
        if self._deaths == MAX_DEATHS:
            raise CannotRun(
                f"{MAX_DEATHS} workers have ended with no row finished between them; the last was "
                f"{member}: {reason}",
                hint="finished rows are kept; Ray's logs say more",
            )
        self._note(f"{member} has ended, and its rows are done again: {reason}")
        self._remove(member)
        self._add(member.name)

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
