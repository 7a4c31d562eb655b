"""RunOptions: how to run a model, the options of LLM and of the commands.

The planner reads the options of workload and memory, LLM the others.
"""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from dakrun.config import (
    DTYPE_BYTES,
    Dtype,
    LoadFormat,
    ModelConfig,
    Speculation,
    Workload,
    model_len,
)
from dakrun.errors import check_choice, check_count, check_number, invalid_value
from dakrun.formats.named import NAMES as FORMAT_NAMES
from dakrun.hardware import HardwareProfile
from dakrun.models.popularity import AUTO, with_popularity
from dakrun.plan.batch_size import MAX_BATCH_SIZE, choose_batch_size
from dakrun.plan.expected_run import ExpectedRun
from dakrun.plan.plan import Plan
from dakrun.plan.planner import make_plan
from dakrun.plan.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a model.

    - `batch_size`: requests decoded together at most. "auto" takes the size up to `max_batch_size`
      with the most predicted tokens per second, among those whose decode step is predicted to take
      at most `max_decode_step` seconds.
    - `max_model_len`: tokens of prompt and completion together; by default the model's positions,
      at most 4,096.
    - `expected_tokens`, `expected_prompt`: lengths of completions and prompts to plan for, in
      tokens. The default prompt is half of the tokens of max_model_len that are left
      after `expected_tokens`.
    - `expected_run`: the lengths of all requests, if they are known (see plan.ExpectedRun). They
      replace `expected_tokens` and `expected_prompt`, and `batch_size` "auto" takes the
      size with the shortest run.
    - `profile`: a HardwareProfile, its name or file. "auto" takes the profile that
      `dakrun profile` saved for this device, else a shipped one; it never measures.
    - `needs_tokenizer`: raise an error if the checkpoint has no tokenizer. Without this, a model
      that has none takes and returns token ids.
    - `chat_template`: a Jinja template instead of the tokenizer's own.
    - `reasoning`: the markers of thoughts in answers, OPEN,CLOSE, by default ("auto") those of the
      family that the chat template is of. With "off" thoughts are a part of the answer.
    - `load_format`: "dummy" makes random weights; the model may then be a known name, or a folder
      with only a config.json.
    - `format`: of the random weights of a model that is not quantized, such as "awq" or "fp8".
    - `popularity`: how often tokens choose each expert of a mixture, by which experts are placed:
      "auto" is what earlier runs counted, "uniform" all alike, "zipf:1.0" Zipf's law, else the name
      of a file (see models/popularity.py).
    - `choices`: the popularity by which the routers of random weights choose; "auto" is that by
      which experts are placed.
    - `speculate`: whether steps carry drafts of a row's next tokens, which change no result:
      "suffix" or "suffix:K", up to K tokens from text that is there already; "auto" where that is
      measured to be faster; "off".
    - `threads`: CPU threads of torch, in the whole process; by default one for each core that the
      process may use, and at most torch's own default. Where other programs need the CPU, set
      OMP_WAIT_POLICY and GOMP_SPINCOUNT before torch is imported, as cli/main.py does.
    - `started`: the local time that chat templates stamp (`strftime_now`); by default now.

    Raises UsageError for invalid values.
    """

    dtype: Dtype | Literal["auto"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    profile: str | Path | HardwareProfile = "auto"
    batch_size: int | Literal["auto"] = "auto"
    max_batch_size: int = MAX_BATCH_SIZE
    max_decode_step: float | None = None
    max_model_len: int | None = None
    expected_tokens: int = 128
    expected_prompt: int | None = None
    expected_run: ExpectedRun | None = None
    policy: Policy = field(default_factory=Policy)
    needs_tokenizer: bool = False
    chat_template: str | None = None
    reasoning: str = "auto"
    load_format: LoadFormat = "auto"
    format: str = "auto"
    popularity: str = AUTO
    choices: str = AUTO
    speculate: str = "off"
    threads: int | None = None
    started: datetime | None = None

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("auto", *DTYPE_BYTES))
        check_choice("device", self.device, ("auto", "cuda", "cpu"))
        check_choice("load_format", self.load_format, get_args(LoadFormat))
        check_choice("format", self.format, ("auto", *FORMAT_NAMES))
        if not isinstance(self.speculate, str):
            raise invalid_value("speculate", self.speculate, "auto, off, suffix or suffix:K")
        _ = self.speculation
        for name, other in (
            *(("threads", None), ("batch_size", "auto"), ("max_model_len", None)),
            ("expected_prompt", None),
        ):
            object.__setattr__(
                self, name, check_count(name, getattr(self, name), or_one_of=(other,))
            )
        for name in ("max_batch_size", "expected_tokens"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        step = check_number("max_decode_step", self.max_decode_step, 0, or_one_of=(None,))
        object.__setattr__(self, "max_decode_step", step)
        if step is not None and self.batch_size != "auto":
            raise invalid_value(
                "max_decode_step",
                step,
                f"None unless batch_size is 'auto', not {self.batch_size}",
            )
        if not isinstance(self.profile, str | Path | HardwareProfile):
            raise invalid_value(
                "profile", self.profile, "a name, a .toml file or a HardwareProfile"
            )
        if not isinstance(self.expected_run, ExpectedRun | None):
            raise invalid_value("expected_run", self.expected_run, "an ExpectedRun or None")
        for name in ("popularity", "choices"):
            if not isinstance(getattr(self, name), str):
                raise invalid_value(name, getattr(self, name), "a name or a file's name")
        if not isinstance(self.started, datetime | None):
            raise invalid_value("started", self.started, "a datetime or None")
        if not isinstance(self.policy, Policy):
            raise invalid_value("policy", self.policy, "a Policy or None")

    @property
    def speculation(self) -> Speculation:
        """The choice that `speculate` names."""
        return Speculation.of(self.speculate)

    def plan(
        self, model: ModelConfig, profile: HardwareProfile, *, choosing: Policy | None = None
    ) -> Plan:
        """The plan of `model` on the machine of `profile`.

        A `batch_size` "auto" is chosen under the policy `choosing`, by default `self.policy`.
        Raises CannotRun if the budgets are too small, UsageError if `max_model_len` exceeds the
        model's positions, or if the popularity is not of this model.
        """
        random = self.load_format == "dummy"
        model = with_popularity(model, self.popularity, random=random, choices=self.choices)
        workload, run = self._workload(model), self.expected_run
        if self.batch_size == "auto":
            limit = self.max_batch_size
            if run is not None:
                limit = min(limit, max(1, run.requests))
            workload = choose_batch_size(
                model,
                workload,
                profile,
                choosing or self.policy,
                limit=limit,
                max_decode_step=self.max_decode_step,
                run=run,
            )
        return make_plan(
            model, workload, profile, self.policy, run=run, max_decode_step=self.max_decode_step
        )

    def _workload(self, model: ModelConfig) -> Workload:
        """The workload; of one request while the batch size is still to be chosen."""
        length = model_len(model, self.max_model_len)
        new_tokens, prompt_len, shared_len = self.expected_tokens, self.expected_prompt, 0
        if self.expected_run is not None and self.expected_run.requests:
            new_tokens = max(1, round(self.expected_run.mean_new))
            prompt_len = max(1, round(self.expected_run.mean_prompt))
            shared_len = min(round(self.expected_run.mean_shared), prompt_len - 1)
        new_tokens = min(new_tokens, max(1, length - 1))
        return Workload(
            batch_size=1 if self.batch_size == "auto" else self.batch_size,
            prompt_len=prompt_len or max(1, (length - new_tokens) // 2),
            new_tokens=new_tokens,
            max_model_len=length,
            speculation=self.speculation,
            shared_len=shared_len,
        )
