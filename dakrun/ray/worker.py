"""A worker of `generate --ray`: an actor that takes rows, and returns the lines of their results.

Knows one model on one node; dispatch.py knows the others.
"""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import DakrunError, UsageError
from dakrun.llm import LLM
from dakrun.plan import RunOptions, run_bound
from dakrun.ray.model_thread import ModelThread, Result
from dakrun.ray.node import load_on_node, node_name
from dakrun.requests import AheadRow, RowError, result_line

POLL_S = 1.0  # that a call waits for results at most
GATHER_S = 0.05  # that it waits for more once there are some


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The arguments of load_on_node, and the `defaults` for parameters that rows lack."""

    model: str
    run: RunOptions
    defaults: SamplingParams
    memory_sharers: int = 1


class Loaded(NamedTuple):
    """A worker that is ready: the requests it decodes together, and its tokens/s as planned."""

    slots: int
    tokens_per_s: float


class Failed(NamedTuple):
    """A DakrunError that ended a worker."""

    message: str
    hint: str
    exit_code: int


class Finished(NamedTuple):
    """The result of row `number`: its completions (0 of an error), and its line in the output."""

    number: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    line: bytes

    @classmethod
    def of(cls, number: int, result: Result) -> "Finished":
        """That of `result`."""
        choices = () if isinstance(result, RowError) else result.choices
        return cls(
            number,
            len(choices),
            sum(one.prompt_tokens for one in choices),
            sum(len(one.token_ids) for one in choices),
            result_line(result),
        )


class Progress(NamedTuple):
    """A worker so far: new tokens, its last steps' EB in bytes/s, and its share of the limit."""

    new_tokens: int
    eb_bytes_per_s: float | None
    share: float | None


NONE_YET = Progress(0, None, None)


class Reply(NamedTuple):
    """Rows that have finished, and what ended the worker, if something did."""

    finished: list[Finished]
    progress: Progress
    failed: Failed | None


class Worker:
    """The actor. Its calls may overlap: it is asynchronous."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._finished: list[Finished] = []
        self._failed: Failed | None = None
        self._internal: BaseException | None = None
        self._news = threading.Event()
        self._first_rows = 0.0
        self._last_rows = 0.0
        self._model = ModelThread(self._make, setup.defaults, self._on_result, self._on_end)

    async def node(self) -> str:
        """The name of the node that it is on."""
        return node_name()

    async def load(self) -> Loaded | Failed:
        """Load the model."""
        self._model.start()
        llm = await asyncio.to_thread(self._model.loaded)
        if llm is None:
            await asyncio.to_thread(self._news.wait)
            return self._failure()
        plan = llm.plan
        batch = plan.workload.batch_size
        return Loaded(batch, batch / plan.predicted_s if plan.predicted_s else 1.0)

    async def exchange(self, rows: list[AheadRow]) -> Reply:
        """Take `rows`, and return those that have finished; wait for some if there are none."""
        self._first_rows = self._first_rows or time.perf_counter()
        self._model.add(rows)
        if await asyncio.to_thread(self._news.wait, POLL_S):
            await asyncio.sleep(GATHER_S)
        with self._lock:
            finished, self._finished = self._finished, []
            if self._failed is None and self._internal is None:
                self._news.clear()
        if finished:
            self._last_rows = time.perf_counter()
        if self._internal is not None and not finished:
            raise self._internal
        return Reply(finished, self._progress(), self._failed)

    async def report(self) -> dict[str, Any]:
        """The run's report (see report.make_report), from its first rows to its last."""
        llm = self._llm()
        return await asyncio.to_thread(llm.report, self._last_rows - self._first_rows)

    def _make(self) -> LLM:
        setup = self._setup
        return load_on_node(setup.model, setup.run, memory_sharers=setup.memory_sharers)

    def _llm(self) -> LLM:
        llm = self._model.loaded()
        assert llm is not None, "load() has returned"
        return llm

    def _on_result(self, number: int, result: Result) -> None:
        one = Finished.of(number, result)
        with self._lock:
            self._finished.append(one)
            self._news.set()

    def _on_end(self, problem: BaseException | None) -> None:
        with self._lock:
            if isinstance(problem, DakrunError):
                self._failed = Failed(str(problem), problem.hint, problem.exit_code)
            else:
                self._internal = problem
            self._news.set()

    def _failure(self) -> Failed:
        if self._failed is None:
            raise self._internal or RuntimeError("the model ended")
        return self._failed

    def _progress(self) -> Progress:
        llm = self._llm()
        try:
            plan, stats = llm.plan, llm.engine.stats
        except UsageError:  # closed: the model has ended, or is planned and loaded again
            return NONE_YET
        last = stats.step_s[-100:]
        busy = time.perf_counter() - self._first_rows
        bound = run_bound(
            plan,
            requests=stats.requests,
            prompt_tokens=stats.prompt_tokens - stats.shared_tokens,
            new_tokens=stats.new_tokens,
            steps=len(stats.step_s) + stats.prefill_steps,
            kv_bytes=stats.kv_bytes_read + stats.mixed_kv_bytes,
        )
        return Progress(
            stats.new_tokens,
            plan.weight_bytes * len(last) / sum(last) if last else None,
            bound / busy if plan.profile.comparable else None,
        )
