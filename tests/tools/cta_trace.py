"""Runs a dakrun command with kernels that note where and when their CTAs run. Needs a GPU.

    python tests/tools/cta_trace.py -- bench --model DIR --load-format dummy --batch-size 8

DIR has a config.json, best of 8 layers; --new-tokens 12 keeps it short. A line for each product of
few rows (SplitK_GEMM, W's rows x columns), for decode attention and for each product of experts:
its launches in the last steps, its CTAs that work, the SMs that have them, and SMs that have two.
Then us from the end of the launch before in this list, of the first, median and last CTA: when they
started, when they had waited for earlier kernels (PDL), and when they ended. Where some SMs have
two CTAs of a launch, others have none, and the launch takes up to twice as long.

The kernels are compiled from a copy of native/ with notes; one costs some ns.
"""

import itertools
import shutil
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import torch

from dakrun.cli.main import main as dakrun
from dakrun.kernels.runtime import jit, nvrtc
from dakrun.resources import resource_dir

ROOM = 1_200_000  # notes; older ones are overwritten
SHOWN = 160_000  # of these, the last
FIELDS = 6  # words of a note
ATTENTION, EXPERTS = 1, 2  # keys of launches; of SplitK_GEMM W's rows and columns
_WAIT = "ptx::wait_for_dependencies();"
_NOTED = f"""
#ifdef NOTES_AT
__device__ __forceinline__ void note(uint64_t start, uint64_t waited, uint64_t key) {{
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  const auto at = reinterpret_cast<unsigned long long*>(static_cast<uint64_t>(NOTES_AT));
  unsigned long long* const to = at + {FIELDS} * (1 + atomicAdd(at, 1ull) % {ROOM});
  to[0] = start, to[1] = waited, to[2] = ptx::globaltimer();
  to[3] = sm, to[4] = blockIdx.x, to[5] = key;
}}
#define BEGIN_NOTE() \\
  __shared__ volatile uint64_t times[2]; \\
  if (threadIdx.x == 0) times[0] = ptx::globaltimer()
#define WAITED() times[1] = ptx::globaltimer()
#define NOTE(waited, key) \\
  if (threadIdx.x == 0) note(times[0], waited, key)
#else
#define BEGIN_NOTE()
#define WAITED()
#define NOTE(waited, key)
#endif
"""


def _notes(include: str, key: str, idle: str, *others: tuple[str, str]) -> dict[str, str]:
    """Replacements in a source: behind an `include`, where a kernel begins and idle CTAs end."""
    begin = "  ptx::launch_dependents();\n"
    ends = f"  if ({idle}) {{ fill_sm(); NOTE(0, {key}); return; }}\n"
    return {
        include: include + _NOTED,
        begin: f"{begin}  BEGIN_NOTE();\n",
        f"  if ({idle}) return fill_sm();\n": ends,
        **dict(others),
    }


_SPLITK, _EXPERTS = "(uint64_t(args.m) << 32 | args.k)", f"({EXPERTS} + OUTPUTS)"
_IDLE = "args.order.number() >= args.tiers[args.tier_count].first_cta"
_RUN = "    x_producer.run();\n"
_CONSUME = "    consume(args, ring, tier_number, warp, moments);\n"
_ITEMS = "    consume(args, ring, chosen, own_tier);\n"
_ATTEND = "  // All warps: attend and combine.\n  consume(args, ring);\n"
_FIRST = "    if (threadIdx.x == 0) WAITED();\n"
# By source: lines, each of which it has once, and what takes their place.
NOTES: Mapping[str, Mapping[str, str]] = {
    "splitk_gemm.cu": _notes(
        '#include "splitk_combine.cuh"\n', _SPLITK, "idle",
        (f"    {_WAIT}\n{_RUN}", f"    {_WAIT}\n    WAITED();\n{_RUN}"),
        (_CONSUME, f"{_CONSUME}    NOTE(times[1], {_SPLITK});\n"),
    ),
    "splitk_flash_attn.cu": _notes(
        '#include "attention_merge.cuh"\n', str(ATTENTION), _IDLE,
        (f"  {_WAIT}\n\n{_ATTEND}",
         f"  {_WAIT}\n{_FIRST}{_ATTEND}  NOTE(times[1], {ATTENTION});\n"),
    ),
    "grouped_splitk.cu": _notes(
        '#include "grouped_splitk_epilogue.cuh"\n', _EXPERTS, "idle",
        (f"    {_WAIT}\n{_ITEMS}",
         f"    {_WAIT}\n{_FIRST}{_ITEMS}    NOTE(times[1], {_EXPERTS});\n"),
    ),
}  # fmt: skip


def with_notes(folder: Path) -> None:
    """Copy native/ to `folder`, which does not exist, with NOTES.

    Raises ValueError if a source does not have a line once.
    """
    shutil.copytree(resource_dir("native"), folder)
    for name, lines in NOTES.items():
        text = (folder / name).read_text()
        for line, other in lines.items():
            if text.count(line) != 1:
                raise ValueError(f"{name} has {text.count(line)} times, not once:\n{line}")
            text = text.replace(line, other)
        (folder / name).write_text(text)


class Note(NamedTuple):
    """A CTA: ns when it started, had waited (0: it has no work) and ended; SM, number, launch."""

    start: int
    waited: int
    end: int
    sm: int
    cta: int
    key: int


class Launch(NamedTuple):
    """CTAs that work, SMs that have them, SMs with two, and (first, median, last) us."""

    ctas: int
    sms: int
    doubled: int
    start: Sequence[float]
    waited: Sequence[float]
    end: Sequence[float]


def launches(notes: Iterable[Note]) -> dict[int, list[Launch]]:
    """By key, the launches that have a launch before them, in the order of their ends.

    A CTA's number occurs once in a launch; launches with the same key do not overlap.
    """
    found, latest = list[list[Note]](), dict[int, list[Note]]()
    for note in sorted(notes, key=lambda note: note.end):
        own = latest.get(note.key)
        if own is None or note.cta in {other.cta for other in own}:
            own = latest[note.key] = []
            found.append(own)
        own.append(note)
    working = [[note for note in ctas if note.waited] for ctas in found]
    ordered = sorted(filter(None, working), key=lambda ctas: ctas[-1].end)
    by_key = defaultdict[int, list[Launch]](list)
    for before, ctas in itertools.pairwise(ordered):
        per_sm, zero = Counter(note.sm for note in ctas), before[-1].end

        def spread(times: Iterable[int], zero: int = zero) -> tuple[float, float, float]:
            us = sorted((time - zero) / 1e3 for time in times)
            return us[0], statistics.median(us), us[-1]

        by_key[ctas[0].key].append(Launch(
            len(ctas), len(per_sm), sum(count > 1 for count in per_sm.values()),
            spread(note.start for note in ctas), spread(note.waited for note in ctas),
            spread(note.end for note in ctas),
        ))  # fmt: skip
    return by_key


def name_of(key: int) -> str:
    """What is launched."""
    rows, cols = key >> 32, key & 0xFFFFFFFF
    if rows:
        return f"{rows} x {cols}"
    return "attention" if key == ATTENTION else f"experts, outputs {key - EXPERTS}"


def table(by_key: Mapping[int, Sequence[Launch]]) -> str:
    """A line for each key; all figures are medians over its launches."""
    lines = [
        f"{'':22s} launches CTAs  SMs twice          started           waited            ended"
    ]
    for key, all_of in by_key.items():
        counts = [statistics.median(of) for of in zip(*(one[:3] for one in all_of), strict=True)]
        times = [
            " ".join(f"{statistics.median(of):5.1f}" for of in zip(*some, strict=True))
            for some in zip(*(one[3:] for one in all_of), strict=True)
        ]
        head = f"{name_of(key):22s} {len(all_of):8d} " + " ".join(f"{n:4.0f}" for n in counts)
        lines.append(f"{head}  {'  '.join(times)}")
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    if "--" not in given or not torch.cuda.is_available():
        click.echo("cta_trace.py needs a CUDA GPU, and behind -- a command of dakrun", err=True)
        return 2
    buffer = torch.zeros(FIELDS * (1 + ROOM), dtype=torch.int64, device="cuda")
    plain = jit.held_macros
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "native"
        with_notes(folder)
        nvrtc.resource_dir = lambda name: folder if name == "native" else resource_dir(name)
        jit.held_macros = lambda: {**plain(), "NOTES_AT": buffer.data_ptr()}
        try:
            dakrun(list(given[given.index("--") + 1 :]), standalone_mode=False)
        except SystemExit as end:
            if end.code:
                return 1
    torch.cuda.synchronize()
    found = buffer[FIELDS:].view(ROOM, FIELDS)[: int(buffer[0])].cpu()
    last = found[found[:, 2].argsort()][-SHOWN:]
    click.echo(table(launches(Note(*note) for note in last.tolist())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
