"""A stateful class for Ray Data: prompts in an Arrow table in, completions in one out."""

import asyncio
import hashlib
import itertools
import json
import marshal
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.llm import LLM
from dakrun.plan import run_options
from dakrun.ray.model_thread import ModelThread, Result, no_longer
from dakrun.ray.node import load_on_node
from dakrun.requests import AheadRow, PromptStarts, RowError, own_id
from dakrun.requests.arrow import result_table, row_lines
from dakrun.requests.lengths import json_lengths
from dakrun.requests.native_rows import NATIVE, completion_row, error_row

BATCHES_PER_GROUP = 64  # whose rows begin the longest first; earlier groups begin before later ones


@dataclass
class _Batch:
    """Results of a batch's rows, by their index in it; `done` once `left` of them are missing."""

    results: list[Result | None]
    left: int
    done: Future[Sequence[Result]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # it can no longer be cancelled


class DakrunProcessor:
    """Completes prompts in a Ray Data pipeline: one model for each actor.

        dataset.map_batches(
            DakrunProcessor,
            fn_constructor_kwargs=dict(model="path/to/model", params=SamplingParams(), workers=8),
            compute=ray.data.ActorPoolStrategy(
                min_size=1, max_size=8, max_concurrent_calls_per_actor=8
            ),
            num_gpus=1, batch_size=64, batch_format="pyarrow",
        )

    Each actor plans for the node that it runs on: with the profile kept of its GPU (measured, if
    there is none), and the memory that is free there. Rows of several batches run together: as soon
    as a batch is done its results are given, while those of others go on.

    Columns of a batch are fields of native rows (requests/README.md): `prompt`, `prompt_token_ids`
    or `messages`, and `id`, `max_tokens`, `temperature` and the others, each optional, also row by
    row (null). `params` are for those that a row lacks. Results have the columns of the batch, then
    those of a Parquet output (without `id`), null where there are none; `error` has the `code` and
    `message` of a row that cannot be run. They replace columns of the same names. Noise of sampled
    rows follows from their seed and id; without ids, from their fields and their index in the
    batch.

    `options` are those of LLM, such as `dtype`, `batch_size`, `max_model_len`, `expected_tokens`,
    and `started`, with which the chat template of every actor stamps the same date;
    `workers` says how many actors there are at most, which share a node's host memory. Raises
    UsageError, or CannotRun if the node cannot run the model.
    """

    def __init__(
        self, model: str, *, params: SamplingParams | None = None, workers: int = 1, **options: Any
    ) -> None:
        self._params = params or SamplingParams()
        self._numbers = itertools.count()
        self._batches = itertools.count()
        self._running: dict[int, tuple[_Batch, int]] = {}  # of the rows that run, by number
        self._problem: BaseException | None = None
        self._ended = False
        if self._params.n > 1:
            raise UsageError(f"n is {self._params.n}", hint="give rows a column n")
        if self._params.max_tokens is not None:
            options.setdefault("expected_tokens", max(1, self._params.max_tokens))

        def make() -> LLM:
            return load_on_node(model, run_options(options), memory_sharers=workers)

        self._thread = ModelThread(make, self._params, self._finish, self._end)
        self._thread.start()
        llm = self._thread.loaded()
        if llm is None:
            self._thread.close()
            raise no_longer(self._problem)
        self._max_model_len = llm.rules.max_model_len

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """The batch with its results, in the same order."""
        if not batch.num_rows:
            yield self._table(batch, [])
            return
        rows, own = self._rows(batch), _Batch([None] * batch.num_rows, batch.num_rows)
        for index, row in enumerate(rows):
            self._running[row.number] = own, index
        self._thread.add(rows)
        if self._ended:
            raise no_longer(self._problem)
        yield self._table(batch, await asyncio.wrap_future(own.done))

    def close(self) -> None:
        """Finish the rows that have begun, and give the model's memory back; the end does, too."""
        self._thread.close()

    def _rows(self, batch: pa.Table) -> list[AheadRow]:
        """The rows of a batch, for the thread."""
        group, starts, rows = (
            next(self._batches) // BATCHES_PER_GROUP,
            PromptStarts(),
            list[AheadRow](),
        )
        for index, line in enumerate(row_lines(batch), 1):
            fields = json.loads(line)
            if fields.get("id") is None:
                fields["id"] = f"{hashlib.sha256(line).hexdigest()[:16]}-{index}"
            length = json_lengths(
                fields,
                self._params.limit(self._max_model_len),
                self._max_model_len,
                starts,
            )
            number = next(self._numbers)
            row = AheadRow(
                group=group,
                minus_new=-length.new,
                minus_prompt=-length.prompt,
                number=number,
                id=own_id(fields, number),
                choices=length.choices,
                shared=length.shared,
                nbytes=len(line),
                kind=NATIVE,
                packed=marshal.dumps(fields),
            )
            rows.append(row)
        return rows

    def _finish(self, number: int, result: Result) -> None:
        batch, index = self._running.pop(number)
        batch.results[index] = result
        batch.left -= 1
        if not batch.left:
            batch.done.set_result([result for result in batch.results if result is not None])

    def _end(self, problem: BaseException | None) -> None:
        self._problem, self._ended = problem, True
        for batch, _ in list(self._running.values()):
            if not batch.done.done():
                batch.done.set_exception(no_longer(problem))

    def _table(self, batch: pa.Table, results: Sequence[Result]) -> pa.Table:
        """The batch's columns, and those of its results."""
        rows = [
            error_row(result) if isinstance(result, RowError) else completion_row(result)
            for result in results
        ]
        table = result_table(rows, from_file=False)
        kept = [name for name in batch.column_names if name not in table.column_names]
        for name in kept:
            table = table.append_column(batch.schema.field(name), batch.column(name))
        return table.select([*kept, *(n for n in table.column_names if n not in kept)])
