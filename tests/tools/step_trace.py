"""Runs a dakrun command under torch's profiler and shows the kernels of a decode step, in order.

    python tests/tools/step_trace.py -- bench --model opt-6.7b --load-format dummy --ratio 0

For each kernel of a layer: the us that it ran, its gap to the end of the kernel before, and the us
from that end to its own, which add up to a layer's time. Figures are medians over steps and layers;
grids are those of the middle layer. Kernels outside layers follow. The gap of a step's first kernel
is the gap between steps.

A config.json with 8 layers, --new-tokens 12 and one --batch-size give a trace in half a minute.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from dakrun.cli.main import main as dakrun


class Kernel(NamedTuple):
    """A launch: us that it ran, us between the end of the kernel before and its start, and CTAs."""

    name: str
    duration: float
    gap: float
    grid: str


def kernels(events: list[dict[str, Any]]) -> list[Kernel]:
    """The kernels among the events of a Chrome trace, in the order of their starts."""
    found, end = list[Kernel](), 0.0
    for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"]):
        name = event["name"].removeprefix("void ").split("<")[0].split("(")[0]
        gap = event["ts"] - end if found else 0.0
        found.append(Kernel(name, event["dur"], gap, "x".join(map(str, event["args"]["grid"]))))
        end = event["ts"] + event["dur"]
    return found


def steps_of(launched: list[Kernel], first: str) -> list[list[Kernel]]:
    """The last 12 steps with the most common kernels; names of their first begin with `first`."""
    starts = [i for i, kernel in enumerate(launched) if kernel.name.startswith(first)]
    steps = [launched[a:b] for a, b in zip(starts, [*starts[1:], len(launched)], strict=False)]
    names = [tuple(kernel.name for kernel in step) for step in steps]
    most = Counter(names).most_common(1)
    return [step for step, of in zip(steps, names, strict=True) if of == most[0][0]][-12:]


def layers_of(names: list[str]) -> list[range]:
    """The places of a step's layers: the kernels that repeat over its longest stretch.

    Any kernel of the stretch may begin a layer: take the one with most layers, then the earliest.
    Empty if nothing repeats.
    """
    longest, begin, length = 0, 0, 0
    for size in range(1, len(names) // 2 + 1):
        run = 0
        for i in range(size, len(names)):
            run = run + 1 if names[i] == names[i - size] else 0
            if run >= size and run + size > longest:
                longest, begin, length = run + size, i + 1 - run - size, size
    found = [_places(names, names[i : i + length]) for i in range(begin, begin + length)]
    return max(found, key=lambda places: (len(places), -places[0].start), default=[])


def _places(names: list[str], layer: list[str]) -> list[range]:
    places = list[range]()
    for i in range(len(names)):
        if names[i : i + len(layer)] == layer and (not places or i >= places[-1].stop):
            places.append(range(i, i + len(layer)))
    return places


def lines(steps: list[list[Kernel]]) -> list[str]:
    """The table of steps with the same kernels."""
    layers = layers_of([kernel.name for kernel in steps[0]])
    outside = [(i,) for i in range(len(steps[0])) if not any(i in layer for layer in layers)]
    found = [f"{len(steps)} steps; {len(layers)} layers, and {len(outside)} kernels outside them"]
    found += [f"{'':32s} {'CTAs':>12s} {'us':>9s} {'gap':>9s} {'to end':>9s}"]
    for title, places in (("a layer", zip(*layers, strict=True)), ("outside layers", outside)):
        total = 0.0
        for place in places:
            middle = steps[0][place[len(place) // 2]]
            of = [step[i] for step in steps for i in place]
            times = [(kernel.duration, kernel.gap, kernel.gap + kernel.duration) for kernel in of]
            us, gap, end = map(statistics.median, zip(*times, strict=True))
            found += [f"{middle.name[:32]:32s} {middle.grid:>12s} {us:9.2f} {gap:9.2f} {end:9.2f}"]
            total += end
        found.append(f"{'sum of ' + title:65s} {total:9.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the kernels of a decode step.")
    parser.add_argument(
        "--first", default="embed", help="start of the name of a step's first kernel"
    )
    parser.add_argument("command", nargs="+", help="of dakrun, behind --")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        try:
            dakrun(given.command, prog_name="dakrun")
        except SystemExit as ended:
            if ended.code:
                raise
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(path := f"{folder}/trace.json")
        events = json.loads(Path(path).read_text())["traceEvents"]
    if not (steps := steps_of(kernels(events), given.first)):
        sys.exit(f"no kernel is called {given.first}...; hint: --first, and a command that runs")
    click.echo("\n".join(lines(steps)))


if __name__ == "__main__":
    main()
