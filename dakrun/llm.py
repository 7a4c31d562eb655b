"""The Python API: LLM(model, ...).generate(prompts, SamplingParams(...)).

Puts the pieces together: model -> plan -> tiers -> weights -> engine.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

import torch

from dakrun.config import ModelConfig
from dakrun.engine.build import build_runner, runs_on_kernels, why_plain_torch
from dakrun.engine.engine import Engine
from dakrun.engine.machine_planner import MachinePlanner
from dakrun.engine.offline import OfflineCalls
from dakrun.engine.runner import gpu_errors
from dakrun.engine.unfinished import Unfinished
from dakrun.engine.waiting import Choose
from dakrun.errors import CannotRun, OutOfGpuMemory, UsageError
from dakrun.hardware import HardwareProfile, cpu_name, find_profile, load_profile
from dakrun.kernels.runtime import described_card, gpu_name
from dakrun.memory.limits import check_threads, usable_cores
from dakrun.memory.tiers import Tiers, allocate_tiers
from dakrun.models import hub, popularity
from dakrun.models.families import decoder_of
from dakrun.plan import RESERVE_BYTES, Keywords, RunOptions, read_positions, run_options
from dakrun.report import make_report
from dakrun.requests import (
    Completion,
    PromptRules,
    Request,
    RowError,
    Tokenizer,
    given_markers,
)
from dakrun.units import format_bytes
from dakrun.weights.checkpoint import Checkpoint
from dakrun.weights.dummy import Dummy
from dakrun.weights.loading import OnLoad, tier_capacities

REHEARSED_S = 0.1  # of a step: longer ones do not notice what kernels cost the first time


class LLM(OfflineCalls):
    """A model loaded into its tiers, ready to generate; a context manager that closes it.

    `options` are the fields of RunOptions (plan/options.py describes them) as keyword arguments:
    LLM(model, batch_size=8, max_model_len=2048). Arguments of vLLM's LLM that change nothing, such
    as `tensor_parallel_size=1`, are taken as well. Options that are not given are those of `run`.

    `on_rules` is called with the model's rules for prompts, before anything is loaded.
    `on_allocate` is called while memory is allocated, with the bytes so far and those of all tiers;
    `on_load` while weights load, with the bytes loaded so far and those of all weights.

    If the GPU's memory runs out, while loading or later, the model is planned once more, with an
    HBM budget that is smaller by what was missing, and loaded again. Unfinished requests begin
    again; `replanned` then says so.

    Raises UsageError for invalid arguments, CannotRun if the model or machine does not allow them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        run: RunOptions | None = None,
        on_rules: Callable[[PromptRules], None] = lambda rules: None,
        on_allocate: OnLoad = lambda done, total: None,
        on_load: OnLoad = lambda done, total: None,
        **options: Unpack[Keywords],
    ) -> None:
        run = run_options(options, run)
        given_markers(run.reasoning)
        if run.threads is not None:
            check_threads(run.threads)
        torch.set_num_threads(run.threads or min(torch.get_num_threads(), usable_cores()))
        self.config, directory = hub.find_model(str(model), run.dtype, run.load_format, run.format)
        self.device = _device(run.device)
        self.profile = _profile(run.profile, self.device)
        tokenizer = _tokenizer(directory, run)
        self.config = _with_end_token(self.config, tokenizer)
        self._planner = MachinePlanner(self.config, self.profile, self.device, run)
        self.plan = self._planner.plan(run.policy)
        self.rules = PromptRules.of(self.config, self.plan.workload.max_model_len, tokenizer)
        on_rules(self.rules)
        self._directory = None if run.load_format == "dummy" else directory
        self._on_load, self._on_allocate = on_load, on_allocate
        self._tiers = Tiers()
        self._engine: Engine | None = None
        self.load_s = 0.0
        self.replanned = ""
        try:
            self._start()
        except OutOfGpuMemory as problem:
            missing = problem.missing
        else:
            return
        self._plan_again(missing)  # not in the handler: its traceback keeps tensors alive

    def close(self) -> None:
        """Free the tiers and end all generation. A second call does nothing."""
        if self._engine is not None:
            self._keep_counts(self._engine)
            self._engine.close()
        self._engine = None  # its tensors view the tiers
        self._tiers.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def fallback(self) -> str | None:
        """Why this GPU runs the model on plain torch, not on dakrun's kernels; None if it does."""
        return why_plain_torch(self.plan, self.device)

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests; UsageError once this LLM is closed."""
        if self._engine is None:
            raise UsageError(
                "this LLM is closed", hint="generate inside its `with` block, or make another"
            )
        return self._engine

    def run(
        self,
        requests: Iterable[Request | None],
        *,
        may_wait: bool = False,
        choose: Choose | None = None,
    ) -> Iterator[Completion | RowError]:
        """Results of rows; if the GPU's memory runs out, unfinished requests begin again once."""
        unfinished = Unfinished(requests)
        while True:
            try:
                found = self.engine.generate(unfinished, may_wait=may_wait, choose=choose)
                with gpu_errors(), closing(found) as results:
                    for result in results:
                        if row := unfinished.finish(result):
                            yield row
                return
            except OutOfGpuMemory as problem:
                if self.replanned:
                    raise self._given_up(problem) from None
                missing = problem.missing
            self._plan_again(missing)

    def report(self, wall_s: float | None = None) -> dict[str, Any]:
        """The report of everything generated so far (see report.make_report).

        `wall_s` is the elapsed time in seconds, by default that of all steps alone.
        While a stream runs, the report has no times by op.
        """
        stats = self.engine.stats
        if wall_s is None:
            wall_s = stats.prefill_s + sum(stats.step_s)
        on_gpu = self.device.type == "cuda"
        return make_report(
            self.plan,
            stats,
            self.engine.op_seconds(round(read_positions(self.plan.workload))),
            self.engine.runner.details(),
            device=gpu_name(self.device) if on_gpu else cpu_name(),
            load_s=self.load_s,
            wall_s=wall_s,
            fallback=self.fallback,
            use=self.engine.runner.expert_use,
        )

    def _keep_counts(self, engine: Engine) -> None:
        """Keep the counts of experts for the next plan; none of random weights."""
        use = engine.runner.expert_use
        if use is not None and self._directory is not None:
            with suppress(RuntimeError):  # of a GPU that has failed
                popularity.keep(self.config, use.counts())

    def _start(self) -> None:
        """Load the plan's weights and make the engine; on an error nothing stays allocated."""
        self.load_s -= time.perf_counter()
        try:
            directory = self._directory
            files = Checkpoint(directory) if directory else nullcontext(Dummy())
            with gpu_errors(), files as source:
                source.check(decoder_of(self.plan.model))
                capacities = tier_capacities(
                    self.plan, packed=runs_on_kernels(self.plan, self.device)
                )
                self._tiers = allocate_tiers(capacities, self.device, self._on_allocate)
                runner = build_runner(source, self.plan, self._tiers, self.device, self._on_load)
                self._engine = Engine(
                    runner,
                    self.plan,
                    self.rules.tokenizer,
                    self.rules.grammars,
                    self._planner.options.speculation,
                )
                if self.plan.predicted_s < REHEARSED_S:
                    runner.rehearse()
        except BaseException:
            self.close()
            raise
        finally:
            self.load_s += time.perf_counter()

    def _plan_again(self, missing: int) -> None:
        """Plan with `missing` bytes less of GPU memory, RESERVE_BYTES at least, and load again.

        If other programs have taken some of it meanwhile, plan with what is free now.
        """
        stats = self._engine.stats if self._engine else None
        self.close()
        gc.unfreeze()  # cli/generate.py froze them
        gc.collect()  # the failed engine's tensors, some of which are in cycles
        torch.cuda.empty_cache()
        budget = self.plan.budgets[0] - max(missing, RESERVE_BYTES)
        budget = max(0, min(budget, self._planner.free_memory()[0]))
        self.replanned = (
            f"the GPU's memory ran out{f' by {format_bytes(missing)}' if missing else ''}; planned "
            f"again with an HBM budget of {format_bytes(budget)}"
        )
        self.plan = self._planner.plan(replace(self.plan.policy, hbm_budget=budget))
        try:
            self._start()
        except OutOfGpuMemory as problem:
            raise self._given_up(problem) from None
        if stats is not None:
            self.engine.stats = stats

    def _given_up(self, problem: OutOfGpuMemory) -> OutOfGpuMemory:
        """The error for `problem` if it comes again after a second plan."""
        budget = self.plan.budgets[0]
        less = max(0, budget - max(problem.missing, RESERVE_BYTES))
        return OutOfGpuMemory(
            f"{problem}, with an HBM budget of {format_bytes(budget)} too",
            hint=f"use --hbm-budget {less >> 20}MiB, lower --batch-size or --max-model-len, or end "
            "other programs on the GPU",
            missing=problem.missing,
        )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise CannotRun(
            "no CUDA GPU can be used here", hint="use --device cpu, or see: dakrun doctor"
        )
    has_gpu = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def _tokenizer(directory: Path | None, run: RunOptions) -> Tokenizer | None:
    if directory is None:
        if run.needs_tokenizer:
            raise UsageError(
                "a model with random weights that is given by name has no tokenizer",
                hint="give prompt_token_ids, or a folder with config.json and the tokenizer",
            )
        return None
    if not run.needs_tokenizer and not Tokenizer.is_in(directory):
        return None
    started = run.started or datetime.now()
    return Tokenizer.load(
        directory, chat_template=run.chat_template, started=started, reasoning=run.reasoning
    )


def _with_end_token(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """`config` whose end tokens are also the tokenizer's own."""
    token = tokenizer.eos_token_id if tokenizer else None
    if token is None or token in config.eos_token_ids:
        return config
    return replace(config, eos_token_ids=(*config.eos_token_ids, token))


def _profile(profile: str | Path | HardwareProfile, device: torch.device) -> HardwareProfile:
    """The profile to plan with; a GPU's limits are its own, or those to which it is held."""
    if isinstance(profile, str | Path):
        if profile != "auto":
            profile = load_profile(str(profile))
        elif device.type == "cpu":
            profile = find_profile(device="cpu")
        else:
            profile = find_profile(device="cuda", name=gpu_name(device))
    return profile.on(described_card(device)) if device.type == "cuda" else profile
