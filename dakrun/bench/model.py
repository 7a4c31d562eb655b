"""Decode steps of whole models beside what memory allows: `dakrun bench --model`.

The ceilings come first, in the same process: HBM and each remote tier alone, and the copy engine;
on a CPU they are the profile's. Then the model is loaded for every point, as `dakrun generate`
loads it, and runs batches of requests of the same length to their ends, so that all slots are busy
in every decode step: a short batch to warm up, then up to three that count. A time is the median
of all steps. What rival.py measures comes before the points of its batch size.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from dakrun.bench.ceilings import Ceilings
from dakrun.bench.effort import FULL
from dakrun.bench.header import head
from dakrun.bench.model_limit import limit_s, measured_links
from dakrun.bench.model_rows import ModelRow, Run, failed_row, measured_row, model_columns
from dakrun.bench.model_sweep import ModelSweep, Point
from dakrun.bench.output import Record
from dakrun.bench.tiers import measure_ceilings
from dakrun.config import SamplingParams
from dakrun.engine.engine import EngineStats
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware.profile import LOCAL, HardwareProfile
from dakrun.llm import LLM
from dakrun.plan.roofline import Links
from dakrun.requests import Request

WARM_UP_TOKENS = 4
ROUNDS = 3
SECONDS = 20.0  # after which no further batch is started
HINT = "choose smaller batches or another --ratio, or end what else uses the memory"


def measure_model(
    sweep: ModelSweep,
    profile: HardwareProfile,
    *,
    command: str,
    note: Callable[[str], None],
) -> Iterator[Record]:
    """Measure all points of `sweep`; a record of those so far after each, which `note` is told of.

    It runs on torch's current GPU, or without one on the CPU, and `profile` is to be of that.
    `command` is kept in the record. Raises UsageError for a profile of another device, CannotRun
    where no point can run: those that cannot are rows without figures otherwise.
    """
    device = _device(profile)
    bench = _Bench(sweep, profile, device)
    points = list(sweep.points())
    note(f"points to measure of {sweep.name}: {len(points)}")
    what = {
        "model": sweep.name,
        "load_format": sweep.load_format,
        "prompt_tokens": sweep.prompt_len,
        "new_tokens": sweep.new_tokens,
    }
    about = head(what, sweep.config.dtype, bench.ceilings, profile, command)
    rows: list[ModelRow] = []
    refusal: CannotRun | None = None
    for point in points:
        try:
            rows.append(bench.row(point))
        except CannotRun as problem:
            refusal = CannotRun(str(problem), hint=problem.hint)  # without what led to it
            rows.append(failed_row(point, str(problem)))
        note(f"{point}: {rows[-1].summary}")
        yield Record(about, model_columns(sweep), tuple(row.figures for row in rows))
    if refusal and all(row.problem for row in rows):
        raise refusal


def _device(profile: HardwareProfile) -> torch.device:
    """Torch's current GPU, or the CPU where there is none; UsageError unless `profile` is of it."""
    on_gpu = torch.cuda.is_available()
    if (profile.device == "cuda") != on_gpu:
        of = "a CPU" if on_gpu else "a GPU, and none can be used here"
        raise UsageError(
            f"profile {profile.name} is of {of}",
            hint="name another one, or --profile auto",
        )
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class _Bench:
    """The measuring of a sweep's points on a device, whose ceilings it finds first."""

    def __init__(self, sweep: ModelSweep, profile: HardwareProfile, device: torch.device) -> None:
        self.sweep, self.profile, self.device = sweep, profile, device
        self._free = self._free_bytes()  # before anything is taken
        self.ceilings = self._measured()
        self._rivals: dict[int, float | None] = {}  # by batch size

    def row(self, point: Point) -> ModelRow:
        """The point's row; CannotRun where it does not fit."""
        rival_s = self._rival_s(point.batch_size)
        self._release()
        try:
            return measured_row(point, self._run(point), rival_s)
        except (torch.OutOfMemoryError, MemoryError) as problem:
            what = str(problem).partition("\n")[0]
            raise CannotRun(f"memory ran out: {what}", hint=HINT) from None

    def _run(self, point: Point) -> Run:
        sweep = self.sweep
        with LLM(
            sweep.name,
            dtype=sweep.config.dtype,
            device="cuda" if self.device.type == "cuda" else "cpu",
            profile=self.profile,
            batch_size=point.batch_size,
            max_model_len=sweep.prompt_len + sweep.new_tokens,
            expected_prompt=sweep.prompt_len,
            expected_tokens=sweep.new_tokens,
            policy=point.policy(sweep.policy),
            load_format=sweep.load_format,
        ) as llm:
            self._rounds(llm, point.batch_size)
            stats, free = llm.engine.stats, self._free_bytes()
            links = self._links(llm)
            return Run(
                plan=llm.plan,
                step_s=stats.step_s,
                ttft_s=stats.ttft_s,
                prefill_s=stats.prefill_s * point.batch_size / stats.requests,
                kv_bytes=stats.kv_bytes_read / len(stats.step_s),
                limit_s=limit_s(llm.plan, links),
                ceiling_bytes_per_s=links.total_rate(),
                gap_s=llm.engine.runner.details().get("replay_gap_s"),
                gpu_bytes=self._free - free if free else None,
            )

    def _rounds(self, llm: LLM, batch_size: int) -> None:
        """Run the batches; afterwards the engine's stats are of those that count."""
        sweep = self.sweep

        def finish(new_tokens: int) -> None:
            for _ in llm.stream(requests(sweep, batch_size, new_tokens)):
                pass

        finish(min(WARM_UP_TOKENS, sweep.new_tokens))
        llm.engine.stats = EngineStats()
        start = time.perf_counter()
        for done in range(ROUNDS):
            if not done or time.perf_counter() - start < SECONDS:
                finish(sweep.new_tokens)

    def _rival_s(self, batch_size: int) -> float | None:
        """Seconds of the rival's step, measured once; None where there is none, or no memory."""
        sweep = self.sweep
        if sweep.rival and batch_size not in self._rivals:
            from dakrun.bench.rival import rival_step_s  # transformers takes seconds to import

            self._release()
            self._rivals[batch_size] = None
            with suppress(torch.OutOfMemoryError):
                self._rivals[batch_size] = rival_step_s(
                    sweep.config,
                    batch_size=batch_size,
                    prompt_len=sweep.prompt_len,
                    new_tokens=sweep.new_tokens,
                    device=self.device,
                )
        return self._rivals.get(batch_size)

    def _release(self) -> None:
        """Give back the memory that the last model left, or the error that ended it."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measured(self) -> Ceilings:
        """The ceilings of a GPU; the profile's of a CPU, all tiers of which are its memory."""
        remote = self.sweep.remote_tiers(self.profile)
        if self.device.type == "cpu":
            return Ceilings({LOCAL: self.profile.hbm_bytes_per_s})
        return measure_ceilings(remote, FULL, self.device, copies=True)

    def _links(self, llm: LLM) -> Links:
        if self.device.type == "cpu":
            return Links.of(self.profile, llm.plan.tiers[1:])
        return measured_links(self.ceilings, self.profile)

    def _free_bytes(self) -> int:
        """Free memory of the GPU; 0 on a CPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0


def requests(sweep: ModelSweep, batch_size: int, new_tokens: int) -> list[Request]:
    """A batch of prompts of random token ids, the same ones every time, which never end early."""
    draw = random.Random(0)
    vocabulary = range(sweep.config.vocab_size)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return [
        Request(
            id=str(number),
            line=number + 1,
            prompt_ids=tuple(draw.choices(vocabulary, k=sweep.prompt_len)),
            params=params,
        )
        for number in range(batch_size)
    ]
