"""Decode steps of whole models compared with memory bandwidth: `dakrun bench --model`.

The ceilings are measured first, in the same process: HBM and each remote tier alone, and the copy
engine; on a CPU they are the profile's. For every point the model is loaded as `dakrun generate`
loads it. It completes batches of requests of equal length, so that all slots are busy in every
decode step: a short batch to warm up, then up to three timed ones. A time is the median of all
steps. With --rival, the step of transformers (rivals/) is measured after the first point of each
batch size: with everything in HBM, and for prefetch and on-demand also once for each ratio.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dakrun.config import OFF, SamplingParams
from dakrun.engine import EngineStats, gpu_errors
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.lab.bench import model_rows
from dakrun.lab.bench.drafts import draft_figures
from dakrun.lab.bench.model_sweep import AUTO, ModelCase, ModelSweep
from dakrun.lab.ceilings import FULL, Ceilings
from dakrun.lab.memory import measure_ceilings
from dakrun.lab.output import Record, head
from dakrun.llm import LLM
from dakrun.models.popularity import UNIFORM, with_popularity
from dakrun.plan import Links, Plan
from dakrun.requests import Request, RowError, RowLengths
from dakrun.units import format_seconds

if TYPE_CHECKING:
    from dakrun.lab.rivals.steps import RivalStep

WARM_UP_TOKENS = 4
ROUNDS = 3
MAX_SECONDS = 5.0  # no further batch begins this long after the first one
HINT = "choose smaller batches or another --ratio, or end other programs that use the memory"


def measure_model(
    sweep: ModelSweep, profile: HardwareProfile, *, command: str, progress: Callable[[str], None]
) -> Iterator[Record]:
    """Measure all points of `sweep`; yields a record of all rows so far after each point.

    Runs on torch's current GPU, or on the CPU if there is none; `profile` must describe that
    device. A point that cannot run becomes a row without figures. Raises UsageError for another
    device's profile, CannotRun if no point can run.
    """
    on_gpu = torch.cuda.is_available()
    if (profile.device == "cuda") != on_gpu:
        described = "a CPU" if on_gpu else "a GPU, and none is available here"
        raise UsageError(
            f"profile {profile.name} describes {described}",
            hint="name another profile, or --profile auto",
        )
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    bench = ModelBench(sweep, profile, device, progress)
    points = list(sweep.points())
    progress(f"points to measure of {sweep.name}: {len(points)}")
    subject = {
        "model": sweep.name,
        "load_format": sweep.load_format,
        "format": sweep.format,
        "prompt_tokens": sweep.prompt_len,
        "new_tokens": sweep.new_tokens,
        "popularity": sweep.popularity,
    }
    header = head(subject, sweep.config.dtype, bench.ceilings, profile, command)
    rows: list[model_rows.Row] = []
    refusal: CannotRun | None = None
    for point in points:
        try:
            rows.append(bench.row(point))
        except CannotRun as problem:
            refusal = CannotRun(str(problem), hint=problem.hint)  # without the traceback
            rows.append(model_rows.row_of(point, problem=str(problem)))
        progress(f"{point}: {model_rows.summary(rows[-1])}")
        yield Record(header, model_rows.model_columns(sweep), tuple(rows))
    if refusal and all(row["problem"] for row in rows):
        raise refusal


class ModelBench:
    """Measures the points of a sweep on a device, after its ceilings, unless they are given.

    A point has up to `rounds` timed batches, ROUNDS by default.
    """

    def __init__(
        self, sweep: ModelSweep, profile: HardwareProfile, device: torch.device,
        progress: Callable[[str], None], *, ceilings: Ceilings | None = None,
        rounds: int | None = None,
    ) -> None:  # fmt: skip
        self.sweep, self.profile, self.device = sweep, profile, device
        self._progress, self._count = progress, rounds or ROUNDS
        self._free = self._free_bytes()  # before anything is allocated
        if ceilings is None:
            remote = sweep.remote_tiers(profile)
            ceilings = Ceilings({LOCAL: profile.hbm_bytes_per_s})  # tiers of a CPU share its memory
            if device.type == "cuda":
                ceilings = measure_ceilings(remote, FULL, device, copies=True)
        self.ceilings = ceilings
        self._rivals: dict[tuple[int, float], RivalStep | None] = {}

    def row(self, point: ModelCase) -> model_rows.Row:
        """Measure a point and its rival; CannotRun if it does not fit."""
        row, plan = self.run(point)
        return row | self._rival(point, row, plan) if self.sweep.rival else row

    def run(self, point: ModelCase) -> tuple[dict[str, Any], Plan]:
        """Measure a point without its rival; CannotRun if it does not fit."""
        self._release()
        try:
            return self._run(point)
        except (torch.OutOfMemoryError, MemoryError) as problem:
            reason = str(problem).partition("\n")[0]
            raise CannotRun(f"memory ran out: {reason}", hint=HINT) from None

    def _run(self, point: ModelCase) -> tuple[dict[str, Any], Plan]:
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
            format=sweep.format,
            popularity=sweep.popularity if point.order == "use" else UNIFORM,
            choices=sweep.popularity if sweep.load_format == "dummy" else AUTO,
            speculate=f"suffix:{sweep.speculate}" if sweep.speculate else "off",
        ) as llm:
            if llm.fallback:
                self._progress(f"runs on plain torch, slower than the kernels: {llm.fallback}")
            llm.engine.prompts_first = True  # else few rows are left when the last prompt ends
            llm.engine.speculate(OFF)
            llm.engine.runner.moves_experts = False  # the plan's placement is what is measured
            ttft_s = statistics.median(self._rounds(llm, point.batch_size))
            stats, free = llm.engine.stats, self._free_bytes()
            use = llm.engine.runner.expert_use
            links = (
                Links.of(self.profile, llm.plan.tiers[1:])
                if self.device.type == "cpu"
                else model_rows.measured_links(self.ceilings, self.profile)
            )
            reads = use.tier_reads(llm.plan) if use else {}
            row = model_rows.measured_row(
                point,
                llm.plan,
                step_s=stats.step_s,
                ttft_s=ttft_s,
                kv_bytes=stats.kv_bytes_read / len(stats.step_s),
                limit_s=model_rows.limit_s(llm.plan, links, reads),
                ceiling_bytes_per_s=links.total_rate(),
                gap_s=llm.engine.runner.details().get("replay_gap_s"),
                gpu_bytes=self._free - free if free else None,
                experts_per_step=use.read_per_step() if use else None,
                local_read_share=use.local_share(llm.plan) if use else None,
                expert_reads=reads,
            )
            if sweep.speculate:
                batch = partial(self._batch, llm, point.batch_size, sweep.new_tokens)
                row |= draft_figures(
                    llm, sweep.speculate, point.batch_size, sweep.new_tokens, batch
                )
            return row, llm.plan

    def _rounds(self, llm: LLM, batch_size: int) -> list[float]:
        """Run the batches: seconds of the prompts of each timed one, all of which stats cover."""
        new_tokens = self.sweep.new_tokens
        self._batch(llm, batch_size, min(WARM_UP_TOKENS, new_tokens))
        llm.engine.stats = EngineStats()
        if (use := llm.engine.runner.expert_use) is not None:
            use.clear()
        start, prompts_s = time.perf_counter(), list[float]()
        while not prompts_s or (
            len(prompts_s) < self._count and time.perf_counter() - start < MAX_SECONDS
        ):
            before = llm.engine.stats.prefill_s
            self._batch(llm, batch_size, new_tokens)
            prompts_s.append(llm.engine.stats.prefill_s - before)
        return prompts_s

    def _batch(self, llm: LLM, batch_size: int, new_tokens: int) -> None:
        """Complete a batch of requests."""
        rows = [RowLengths(self.sweep.prompt_len, new_tokens)] * batch_size
        finish(llm, requests(rows, self.sweep.config.vocab_size))

    def _rival(self, point: ModelCase, row: model_rows.Row, plan: Plan) -> dict[str, Any]:
        """The rival's figures for a point, with as many bytes outside HBM as its plan has.

        The rival keeps weights there alone, and whole layers of them, the plan also KV blocks.
        """
        outside = sum(sum(plan.memory(tier).values()) for tier in range(1, len(plan.tiers)))
        percent = min(100, math.ceil(100 * outside / plan.weight_bytes))
        ratio = percent / 100
        found: dict[str, Any] = {"rival": self.sweep.rival}
        best = step = self._rival_step(point.batch_size, 0.0)
        if self.sweep.rival != "transformers":
            step = self._rival_step(point.batch_size, ratio)
        if step:
            found |= {"rival_s": step.seconds, "speedup": step.seconds / row["step_s"]}
            found |= {"rival_ratio": step.ratio}
            found |= {"rival_eb_bytes_per_s": row["weight_bytes"] / step.seconds}
        if best:
            found |= {"rival_best_s": best.seconds, "best_speedup": best.seconds / row["step_s"]}
        return found

    def _rival_step(self, batch_size: int, ratio: float) -> "RivalStep | None":
        """The rival's step, measured once; None, and a message, if it cannot run."""
        sweep, key = self.sweep, (batch_size, ratio)
        if key not in self._rivals:
            from dakrun.lab.rivals import steps  # transformers takes seconds to import

            assert sweep.rival
            self._release()
            self._rivals[key] = None
            try:
                with gpu_errors():
                    self._rivals[key] = step = steps.rival_step(
                        sweep.rival,
                        with_popularity(sweep.config, sweep.popularity, random=True),
                        ratio=ratio,
                        batch_size=batch_size,
                        prompt_len=sweep.prompt_len,
                        new_tokens=sweep.new_tokens,
                        device=self.device,
                    )
                ratio, found = step.ratio, f"step {format_seconds(step.seconds)}"
            except CannotRun as problem:
                found = f"not measured: {problem}"
            self._progress(f"{sweep.rival}, batch {batch_size}, {ratio:.2%} remote: {found}")
        return self._rivals[key]

    def _release(self) -> None:
        """Free the memory of the last model, or of the error that ended it."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        """Free memory of the GPU; 0 on a CPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0


def requests(rows: Sequence[RowLengths], vocabulary: int) -> Iterator[Request]:
    """Requests of random token ids with a fixed seed; end-of-sequence is ignored."""
    draw = random.Random(0)
    for number, row in enumerate(rows):
        yield Request(
            id=str(number),
            line=number + 1,
            prompt_ids=tuple(draw.choices(range(vocabulary), k=row.prompt)),
            params=SamplingParams(max_tokens=row.new, ignore_eos=True),
        )


def finish(llm: LLM, asked: Iterator[Request]) -> int:
    """Complete all requests as `dakrun generate` does; returns their new tokens.

    Raises CannotRun if one fails.
    """
    tokens = 0
    for result in llm.run(asked):
        if isinstance(result, RowError):
            raise CannotRun(result.message, hint="try --dtype bfloat16, or another model")
        tokens += len(result.token_ids)
    return tokens
