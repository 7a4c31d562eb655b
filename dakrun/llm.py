"""The Python API: LLM(model, ...).generate(prompts, SamplingParams(...)).

Puts the pieces together: model -> plan -> tiers -> weights -> engine.
"""

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dakrun.config import DTYPE_BYTES, Dtype, LoadFormat, ModelConfig
from dakrun.engine.build import build_runner, runs_on_kernels, why_plain_torch
from dakrun.engine.engine import Engine
from dakrun.engine.machine_planner import MachinePlanner
from dakrun.engine.offline import OfflineCalls
from dakrun.engine.runner import Runner, gpu_errors
from dakrun.engine.unfinished import Unfinished
from dakrun.errors import (
    CannotRun,
    OutOfGpuMemory,
    UsageError,
    check_choice,
    check_count,
    check_number,
    invalid_value,
    refuse_unsupported,
)
from dakrun.hardware import HardwareProfile, cpu_name, find_profile, load_profile
from dakrun.memory import (
    Tiers,
    allocate_tiers,
    check_threads,
    usable_cores,
)
from dakrun.models import hub
from dakrun.models.families import decoder_of
from dakrun.plan import (
    MAX_BATCH_SIZE,
    RESERVE_BYTES,
    ExpectedRun,
    Policy,
)
from dakrun.report import make_report
from dakrun.requests import (
    Completion,
    PromptRules,
    Request,
    RowError,
    Tokenizer,
)
from dakrun.units import format_bytes
from dakrun.weights.checkpoint import Checkpoint
from dakrun.weights.dummy import Dummy
from dakrun.weights.loading import OnLoad, tier_capacities

# Arguments of vLLM's LLM, and their values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "disable_log_stats": (True, False),
    "pipeline_parallel_size": (1,),
    "seed": (0,),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False,),
}


class LLM(OfflineCalls):
    """A model loaded into its tiers, ready to generate; a context manager that closes it.

    - `batch_size`: requests decoded together at most. "auto" takes the size up to `max_batch_size`
      with the most predicted tokens per second, among those whose decode step is predicted to take
      at most `max_decode_step` seconds.
    - `max_model_len`: tokens of prompt and completion together; by default the model's positions,
      at most 4,096.
    - `expected_tokens`, `expected_prompt`: lengths of completions and prompts to plan for, in
      tokens. The default prompt is half of the tokens of max_model_len that are left
      after `expected_tokens`.
    - `expected_run`: the lengths of all requests, if they are known (see plan.ExpectedRun): they
      take the place of both, and "auto" takes the batch size with which they are done first.
    - `profile`: a HardwareProfile, its name or file. "auto" takes the profile that
      `dakrun profile` saved for this device, else a shipped one; it never measures.
    - `needs_tokenizer`: raise an error if the checkpoint has no tokenizer. Without this, a model
      that has none takes and returns token ids.
    - `started`: the local time that chat templates stamp (`strftime_now`); by default that of now.
    - `threads`: CPU threads of torch, in the whole process; by default as many as there are cores
      that it may use, and at most torch's own default. Where other programs need the CPU, set
      OMP_WAIT_POLICY and GOMP_SPINCOUNT before torch is imported, as cli/main.py does.
    - `on_allocate`: called while memory is allocated, with the bytes so far and those of all tiers.
    - `on_load`: called while weights load, with the bytes loaded so far and those of all weights.
    - `chat_template`: a Jinja template in place of the tokenizer's own.
    - `load_format`: "dummy" makes random weights; `model` may then be a known name, or a folder
      with only a config.json.

    If the GPU's memory runs out, while loading or later, the model is planned once more, with an
    HBM budget that is smaller by what was missing, and loaded again. Unfinished requests begin
    again; `replanned` then says so.

    `other` are arguments of vLLM's LLM that change nothing, such as `tensor_parallel_size=1`.

    Raises UsageError for invalid arguments, CannotRun if the model or machine does not allow them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Dtype | Literal["auto"] = "auto",
        device: Literal["auto", "cuda", "cpu"] = "auto",
        profile: str | Path | HardwareProfile = "auto",
        batch_size: int | Literal["auto"] = "auto",
        max_batch_size: int = MAX_BATCH_SIZE,
        max_decode_step: float | None = None,
        max_model_len: int | None = None,
        expected_tokens: int = 128,
        expected_prompt: int | None = None,
        expected_run: ExpectedRun | None = None,
        policy: Policy | None = None,
        needs_tokenizer: bool = False,
        chat_template: str | None = None,
        load_format: LoadFormat = "auto",
        threads: int | None = None,
        on_allocate: OnLoad = lambda done, total: None,
        started: datetime | None = None,
        on_load: OnLoad = lambda done, total: None,
        **other: Any,
    ) -> None:
        refuse_unsupported(other, _NEUTRAL, list(signature(LLM).parameters)[:-1])
        check_choice("dtype", dtype, ("auto", *DTYPE_BYTES))
        check_choice("device", device, ("auto", "cuda", "cpu"))
        check_choice("load_format", load_format, get_args(LoadFormat))
        threads = check_count("threads", threads, or_one_of=(None,))
        if threads is not None:
            check_threads(threads)
        batch_size = check_count("batch_size", batch_size, or_one_of=("auto",))
        max_batch_size = check_count("max_batch_size", max_batch_size)
        max_decode_step = check_number("max_decode_step", max_decode_step, 0, or_one_of=(None,))
        if max_decode_step is not None and batch_size != "auto":
            raise invalid_value(
                "max_decode_step",
                max_decode_step,
                f"None unless batch_size is 'auto', not {batch_size}",
            )
        max_model_len = check_count("max_model_len", max_model_len, or_one_of=(None,))
        expected_tokens = check_count("expected_tokens", expected_tokens)
        expected_prompt = check_count("expected_prompt", expected_prompt, or_one_of=(None,))
        if not isinstance(expected_run, ExpectedRun | None):
            raise invalid_value("expected_run", expected_run, "an ExpectedRun or None")
        if not isinstance(started, datetime | None):
            raise invalid_value("started", started, "a datetime or None")
        if not isinstance(policy, Policy | None):
            raise invalid_value("policy", policy, "a Policy or None")
        torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))
        self.config, directory = hub.find_model(str(model), dtype, load_format)
        self.device = _device(device)
        self.profile = _profile(profile, self.device)
        started = started or datetime.now()
        tokenizer = _tokenizer(directory, chat_template, started, needed=needs_tokenizer)
        self.config = _with_end_token(self.config, tokenizer)
        self._planner = MachinePlanner(
            self.config,
            self.profile,
            self.device,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_decode_step=max_decode_step,
            max_model_len=max_model_len,
            expected_tokens=expected_tokens,
            expected_prompt=expected_prompt,
            expected_run=expected_run,
        )
        self.plan = self._planner.plan(policy or Policy())
        self.rules = PromptRules(
            vocab_size=self.config.vocab_size,
            max_model_len=self.plan.workload.max_model_len,
            max_positions=self.config.max_positions,
            tokenizer=tokenizer,
        )
        self._directory = None if load_format == "dummy" else directory
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

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion | RowError]:
        """Results of Requests; if the GPU's memory runs out, unfinished ones begin again once."""
        unfinished = Unfinished(requests)
        while True:
            try:
                with gpu_errors():
                    for result in self.engine.generate(unfinished):
                        unfinished.drop(result)
                        yield result
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
            self.engine.op_seconds(round(self.plan.workload.mean_kv_len)),
            self.engine.runner.details(),
            device=torch.cuda.get_device_name(self.device) if on_gpu else cpu_name(),
            load_s=self.load_s,
            wall_s=wall_s,
            fallback=self.fallback,
        )

    def _start(self) -> None:
        """Load the plan's weights and make the engine; on an error nothing stays allocated."""
        self.load_s -= time.perf_counter()
        try:
            with gpu_errors():
                runner = self._load(self._directory)
            self._engine = Engine(runner, self.plan, self.rules.tokenizer)
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

    def _load(self, directory: Path | None) -> Runner:
        """The runner, with the weights of the checkpoint in `directory`, or random ones."""
        packed = runs_on_kernels(self.plan, self.device)
        with Checkpoint(directory) if directory else nullcontext(Dummy()) as source:
            source.check(decoder_of(self.config))
            capacities = tier_capacities(self.plan, packed=packed)
            self._tiers = allocate_tiers(capacities, self.device, self._on_allocate)
            return build_runner(source, self.plan, self._tiers, self.device, self._on_load)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise CannotRun(
            "no CUDA GPU can be used here", hint="use --device cpu, or see: dakrun doctor"
        )
    has_gpu = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def _tokenizer(
    directory: Path | None, chat_template: str | None, started: datetime, *, needed: bool
) -> Tokenizer | None:
    if directory is None:
        if needed:
            raise UsageError(
                "a model with random weights that is given by name has no tokenizer",
                hint="give prompt_token_ids, or a folder with config.json and the tokenizer",
            )
        return None
    if not needed and not Tokenizer.is_in(directory):
        return None
    return Tokenizer.load(directory, chat_template=chat_template, started=started)


def _with_end_token(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """`config` whose end tokens are also the tokenizer's own."""
    token = tokenizer.eos_token_id if tokenizer else None
    if token is None or token in config.eos_token_ids:
        return config
    return replace(config, eos_token_ids=(*config.eos_token_ids, token))


def _profile(profile: str | Path | HardwareProfile, device: torch.device) -> HardwareProfile:
    if isinstance(profile, HardwareProfile):
        return profile
    if not isinstance(profile, str | Path):
        raise invalid_value("profile", profile, "a name, a .toml file or a HardwareProfile")
    if profile != "auto":
        return load_profile(str(profile))
    if device.type == "cpu":
        return find_profile(device="cpu")
    return find_profile(device="cuda", name=torch.cuda.get_device_name(device))
