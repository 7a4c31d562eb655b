"""An evaluation: the points of all figures in order of rank, their results kept, and the page.

Knows the facts of run.json; knows neither how points are measured nor the command line.
"""

import datetime
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dakrun
from dakrun.errors import GpuFailed
from dakrun.hardware import LOCAL, HardwareProfile, profile_text, why_no_kernels
from dakrun.lab.ceilings import Ceilings
from dakrun.lab.evaluate.charts import Entry
from dakrun.lab.evaluate.figures import Figure
from dakrun.lab.evaluate.page import page
from dakrun.lab.evaluate.points import Point, Result
from dakrun.lab.evaluate.predict import predict
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.evaluate.store import Store, read_run, write_csv, write_run
from dakrun.lab.evaluate.tables import tables
from dakrun.lab.output import commit, machine_facts, write_text

COPIED = " by the copy engine"  # behind a tier's name in run.json
Progress = Callable[[int, int, str], None]  # points done, points in all, the next one's name


@dataclass(frozen=True)
class Evaluation:
    """How a run ended: its points, how many were new, and how many the budget left out.

    `untimed` of all points have no time, for lack of memory or for another reason.
    """

    points: int
    new: int
    left: int
    untimed: int
    page: Path


def evaluate(
    scope: Scope,
    kinds: Mapping[str, type[Figure]],
    store: Store,
    find: Callable[[Point], Result],
    run: Mapping[str, Any],
    *,
    budget_s: float | None = None,
    progress: Progress = lambda done, total, name: None,
    finished: Callable[[str, int], None] = lambda figure, points: None,
) -> Evaluation:
    """Find the results of all points that `store` lacks, with `find`; write CSV files and the page.

    Points of lower rank come first. None begins later than `budget_s` seconds. `finished` is called
    for each figure that has all its points. `run` is written as run.json, in the end with the dates
    and commits of all results. The page is also written when an error or an interrupt ends the run.
    """
    figures = [kind(scope, store.results) for kind in kinds.values()]
    points = in_order(entry for figure in figures for entry in figure.entries)
    missing = [point for point in points if point.key not in store.results]
    left = {of.name: {entry.point.key for entry in of.entries} for of in figures}
    known, start, done = len(points) - len(missing), time.perf_counter(), 0

    def tell(point: Point | None) -> None:
        progress(known + done, len(points), describe(point) if point else "")
        for name in [name for name, keys in left.items() if keys <= store.results.keys()]:
            finished(name, len(left.pop(name)))

    write_run(store.folder, run)
    try:
        for point in missing:
            if budget_s is not None and time.perf_counter() - start > budget_s:
                break
            tell(point)
            try:
                store.add(point, find(point))
            except GpuFailed as problem:  # not tried again by the next run
                store.add(point, Result(source="measured", problem=str(problem)))
                raise
            done += 1
        tell(None)
    finally:
        run = {**run, **store.sittings(points)}
        write_run(store.folder, run)
        for figure in figures:
            write_csv(store.folder / f"{figure.name}.csv", figure)
        write_text(store.folder / "index.html", page(figures, scope, run))
        write_text(store.folder / "tables.md", tables(figures, scope, run))
    found = [store.results[point.key] for point in points if point.key in store.results]
    untimed = sum(bool(result.problem) for result in found)
    left_out = len(missing) - done
    return Evaluation(len(points), done, left_out, untimed, store.folder / "index.html")


def facts(scope: Scope, command: str) -> dict[str, Any]:
    """What run.json says of this run before anything is measured."""
    machine, versions = f"predicted for {scope.profile.name}", {"dakrun": dakrun.__version__}
    if not scope.predict:
        from dakrun.kernels.runtime import gpu_id

        here = machine_facts(scope.profile)
        machine = here["device"]
        if scope.profile.device == "cuda":  # a run goes on with the same card alone
            machine += f" ({gpu_id()})"
        versions |= {name: here[name] for name in ("torch", "cuda", "driver") if here[name]}
        if scope.vllm_python:
            from dakrun.lab.rivals.vllm import version

            versions |= {"vllm": version(scope.vllm_python) or "not installed"}
    return {
        "machine": machine,
        "profile": f"{scope.profile.name} ({_digest(scope.profile)})",
        "why_no_kernels": why_no_kernels(scope.profile) if scope.predict else None,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": versions,
        "models": list(scope.models),
        **{name: getattr(scope, name) for name in ("remote", "rivals", "quick", "predict")},
        "command": command,
    }


def origin(known: Mapping[str, Any]) -> str:
    """Whose results count in a run with the facts `known`: this machine's by the same profile.

    A profile says where bytes lie and which SMs read them.
    """
    return f"{known['machine']}, planned by {known['profile']}"


def _digest(profile: HardwareProfile) -> str:
    """Eight hexadecimal digits that change with what the profile says."""
    return hashlib.sha256(profile_text(profile).encode()).hexdigest()[:8]


@contextmanager
def finder(
    scope: Scope, folder: Path, known: Mapping[str, Any]
) -> Iterator[tuple[Callable[[Point], Result], dict[str, Any]]]:
    """A function from points to results, and the facts of the run with earlier commands.

    Measuring begins with the ceilings of HBM and the link, unless `folder` has them from an earlier
    run on this machine.
    """
    before = read_run(folder)
    same = before.get("machine") == known["machine"]
    alike = same and before.get("profile") == known["profile"]
    earlier = before.get("commands", []) if alike else []
    run = {**known, "commands": list(dict.fromkeys([*earlier, known["command"]]))}
    if scope.predict:
        yield (lambda point: predict(point, scope)), run
        return
    import torch

    from dakrun.lab.evaluate.measure import Measurer

    on_gpu = scope.profile.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    kept = before.get("ceilings", {}) if same else {}
    with Measurer(scope, device, ceilings_of(kept, scope.remote)) as measurer:
        rates, copied = measurer.ceilings.rates, measurer.ceilings.copied
        ceilings = {**rates, **{f"{name}{COPIED}": rate for name, rate in copied.items()}}
        yield measurer, {**run, "ceilings": ceilings, "ceilings_measured": on_gpu}


def ceilings_of(kept: Mapping[str, float], remote: str) -> Ceilings | None:
    """The ceilings in a run.json, in bytes/s; None if it lacks those of the tier `remote`."""
    if not kept.keys() >= {LOCAL, remote, f"{remote}{COPIED}"}:
        return None
    return Ceilings({LOCAL: kept[LOCAL], remote: kept[remote]}, {remote: kept[f"{remote}{COPIED}"]})


def in_order(entries: Iterable[Entry]) -> list[Point]:
    """The points of `entries`, each once, by rank, then those of a kind and model together."""
    ranks: dict[str, tuple[int, Point]] = {}
    for entry in entries:
        before, _ = ranks.get(entry.point.key, (entry.rank, None))
        ranks[entry.point.key] = min(before, entry.rank), entry.point

    def place(of: tuple[int, Point]) -> tuple[int, str, str]:
        return of[0], of[1].kind, str(getattr(of[1], "model", ""))

    return [point for _, point in sorted(ranks.values(), key=place)]


def describe(point: Point) -> str:
    """A point in a few words, for progress."""
    known = {"by": "dakrun", **point.figures()}
    ratio, by = known.get("ratio"), known["by"]
    parts = [
        known.get("model") or known.get("remote"),
        known.get("op") or point.kind,
        f"batch {rows}" if (rows := known.get("batch_size")) else None,
        f"N={rows}" if (rows := known.get("n")) else None,
        None if ratio is None else f"{ratio:.2%} remote",
        None if by == "dakrun" else by,
    ]
    return ", ".join(filter(None, parts))
