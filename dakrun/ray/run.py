"""`dakrun generate --ray`: prompts of files to the workers of a cluster, and results to parts.

Puts the pieces together; the arguments are those of `dakrun generate`.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from rich.console import Console

from dakrun.config import SamplingParams, model_len
from dakrun.errors import UsageError
from dakrun.generate import Counts
from dakrun.hardware import HardwareProfile, load_profile
from dakrun.interrupt import Interrupted
from dakrun.models.hub import find_model
from dakrun.plan import RunOptions
from dakrun.ray.cluster import connected, resources
from dakrun.ray.dispatch import Dispatcher, WorkerState
from dakrun.ray.inputs import InputFiles
from dakrun.ray.parts import PartFormat, ResultParts
from dakrun.ray.worker import Finished, Setup, Worker
from dakrun.requests import AheadRow, InputRow, RequestReader, check_sentencepiece, make_fingerprint
from dakrun.tables import Column, print_table
from dakrun.terminal.progress import progress_bar
from dakrun.units import counted

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where a run computes, and what its parts are."""

    address: str
    workers: int | None = None
    part_format: PartFormat = "jsonl"


def generate_on_ray(
    *,
    model: str,
    source: str,
    output: str,
    on: RayOptions,
    params: SamplingParams,
    run: RunOptions,
    resume: bool = False,
    force: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], Counts]:
    """Complete the prompts at `source` into the folder `output`; returns the report and the counts.

    `console` shows progress. The report has the numbers of
    rows and tokens, and each worker's own report, or None if it has died. Raises UsageError or
    CannotRun; Interrupted by a signal. Whatever is raised, finished rows are on disk.
    """
    parts = ResultParts(
        output, form=on.part_format, resume=resume, force=force, overwrite=overwrite
    )
    files = InputFiles(source, well_formed_ids=on.part_format == "parquet")
    _check_apart(files, source, output)
    config, folder = find_model(model, run.dtype, run.load_format, run.format)
    if folder is not None:
        check_sentencepiece(folder)
    profile = str(run.profile)
    hardware: str | HardwareProfile = profile if profile == "auto" else load_profile(profile)
    most_tokens = model_len(config, run.max_model_len)
    with RequestReader(files, defaults=params, format=files.format) as reader:
        weights = None if run.load_format == "dummy" else folder
        fingerprint = make_fingerprint(
            config,
            weights,
            reader.row_format(),
            params,
            max_model_len=most_tokens,
            tokenizer_directory=folder,
            chat_template=run.chat_template,
            reasoning=run.reasoning,
        )
        names = {file.path: file.size for file in files.files}
        if told := parts.identify(fingerprint | {"input": names}):
            note(told)
        if resume and (rows := reader.input_rows()) is not None:
            for told in parts.compare(rows):
                note(told)
        threads = run.threads
        with connected(on.address, cpus=(on.workers or 1) * (threads or 1)):
            each, workers = resources(run.device, threads, on.workers)
            expected = reader.expected_run(most_tokens)
            run = replace(
                run,
                expected_run=expected and expected.part(1 / workers),
                device="cuda" if each.gpus else "cpu",
                threads=max(1, int(each.cpus)) if not each.gpus else threads,
                profile=hardware,
                needs_tokenizer=reader.needs_tokenizer(),
                started=parts.started,
            )
            setup = Setup(model=model, run=run, defaults=params)

            actor: Any = ray.remote(Worker).options(max_concurrency=8, **each.options())

            def start(memory_sharers: int) -> Any:
                return actor.remote(replace(setup, memory_sharers=memory_sharers))

            job = _Job(reader, parts, most_tokens, console)
            with parts, job:
                return job.run(start, workers, note)


def _check_apart(files: InputFiles, source: str, output: str) -> None:
    """Raise UsageError if a prompt file lies in the folder of the results."""
    if "://" in source:
        return
    folder = os.path.join(os.path.realpath(output), "")
    if any(os.path.realpath(file.path).startswith(folder) for file in files.files):
        raise UsageError(
            f"{output}: has the prompts of {source}", hint="give -o another folder for the results"
        )


class _Job:
    """The rows of `reader` that `parts` does not have; a context manager that shows progress."""

    def __init__(
        self,
        reader: RequestReader,
        parts: ResultParts,
        max_model_len: int,
        console: Console | None,
    ) -> None:
        self._reader, self._parts, self._max_model_len = reader, parts, max_model_len
        self._progress = progress_bar(console) if console else None
        self._bytes_done = 0
        self._sums = Counter(finished=0, prompt_tokens=0, new_tokens=0)
        self.counts = Counts(0)

    def __enter__(self) -> "_Job":
        self.counts.failed_before = self._parts.failed_before
        if self._progress:
            self._progress.start()
            self._progress.add_task("starting workers", total=self._reader.bytes_total)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._progress:
            self._progress.stop()
        if isinstance(error, KeyboardInterrupt):
            rows = self.counts.done + self.counts.failed
            raise Interrupted(
                f"{counted(rows, 'row')} of this run on disk in {self._parts.folder}",
                hint=self._parts.resume_hint,
                cause=error,
            ) from None

    def run(
        self, start: Callable[[int], Any], workers: int, note: Callable[[str], None]
    ) -> tuple[dict[str, Any], Counts]:
        """Do the rows; returns the report and the numbers of rows."""
        dispatcher = Dispatcher(
            start, workers, on_finished=self._finish, on_progress=self._show, note=note
        )
        try:
            dispatcher.run(self)
            wall_s = time.perf_counter() - dispatcher.began if dispatcher.began else 0.0
            self._parts.end_part()
            by_worker = [
                {"worker": w.name, "node": w.node, "rows": w.finished, "report": report}
                for w, report in dispatcher.reports()
            ]
        finally:
            dispatcher.close()
        new_tokens = self._sums["new_tokens"]
        report = {
            "schema": SCHEMA,
            "rows": vars(self.counts),
            "requests": dict(self._sums),
            "time": {"wall_s": wall_s},
            "tokens_per_s": new_tokens / wall_s if wall_s else None,
            "workers": by_worker,
        }
        return report, self.counts

    def __iter__(self) -> Iterator[AheadRow]:
        """The rows that are left to do."""
        for row in self._reader.unparsed_rows(self._max_model_len):
            assert row is not None, "files do not wait"
            if self._parts.is_done(row.id):
                self.counts.skipped += 1
                self._bytes_done += row.nbytes
            else:
                yield row

    def left(self) -> int | None:
        """How many rows have not been taken; None if there are too many to know."""
        return self._reader.left()

    def _finish(self, finished: Sequence[tuple[AheadRow, Finished]]) -> None:
        """Write results; on return they are on disk."""
        rows = (InputRow(row.id, row.number, row.digest) for row, _ in finished)
        self._parts.write([one.line for _, one in finished], rows)
        for row, one in finished:
            self.counts.failed += not one.requests
            self.counts.done += one.requests > 0
            self._sums.update(
                finished=one.requests, prompt_tokens=one.prompt_tokens, new_tokens=one.new_tokens
            )
            self._bytes_done += row.nbytes

    def _show(self, workers: Sequence[WorkerState]) -> None:
        if not self._progress:
            return
        done = f"{self.counts.done} done, {self.counts.failed} failed"
        self._progress.update(
            self._progress.task_ids[0], completed=self._bytes_done, description=done
        )
        tasks = {task.fields.get("worker"): task.id for task in self._progress.tasks}
        for worker in workers:
            if worker.name not in tasks:
                tasks[worker.name] = self._progress.add_task("", total=None, worker=worker.name)
            self._progress.update(tasks[worker.name], description=describe(worker))


def describe(worker: WorkerState) -> str:
    """A worker's progress in a line."""
    if not worker.node:
        return f"{worker.name}: waits for room in the cluster"
    if not worker.loaded:
        return f"{worker}: loads the model"
    eb, share = worker.progress.eb_bytes_per_s, worker.progress.share
    text = f"{worker}: {worker.tokens_per_s:,.0f} tokens/s"
    text += f", EB {eb / 1e9:,.1f} GB/s" if eb else ""
    return text + (f", {share:.0%} of the limit" if share else "")


def render(report: Mapping[str, Any], console: Console) -> None:
    """Print a summary of a run's report."""
    columns = (
        Column("worker", "left"),
        Column("node", "left"),
        *map(Column, ("rows", "new tokens", "tokens/s", "EB GB/s", "% of limit")),
    )
    print_table(console, columns, list(_lines(report["workers"])), gap=2)
    for worker in report["workers"]:
        if worker["report"] and (why := worker["report"]["fallback"]):
            text = f"{worker['worker']} ran on plain torch, slower than the kernels: {why}"
            console.print(text, highlight=False, markup=False)
    total, wall_s = report["requests"]["new_tokens"], report["time"]["wall_s"]
    console.print(
        f"{total} new tokens in {wall_s:.1f} s: {report['tokens_per_s'] or 0:,.1f} tokens/s",
        highlight=False,
    )


def _lines(workers: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for worker in workers:
        name, node, rows, report = worker.values()
        if report is None:
            yield name, f"{node} (has ended)", str(rows), *"----"
            continue
        eb, times = report["eb_bytes_per_s"], report["time"]
        comparable = report["predictions_comparable"] and times["wall_s"]
        yield (
            name,
            node,
            str(rows),
            str(report["requests"]["new_tokens"]),
            f"{report['tokens_per_s'] or 0:,.1f}",
            f"{eb / 1e9:,.2f}" if eb else "-",
            f"{times['bound_s'] / times['wall_s']:.0%}" if comparable else "-",
        )
