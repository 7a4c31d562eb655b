"""Keyword arguments of LLM: the fields of RunOptions, and vLLM's arguments that change nothing."""

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from dakrun.config import Dtype, LoadFormat
from dakrun.errors import refuse_unsupported
from dakrun.hardware import HardwareProfile
from dakrun.plan.expected_run import ExpectedRun
from dakrun.plan.options import RunOptions
from dakrun.plan.policy import Policy

# Arguments of vLLM's LLM, and their values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "disable_log_stats": (True, False),
    "pipeline_parallel_size": (1,),
    "seed": (0,),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False,),
}


class RunKeywords(TypedDict, total=False):
    """The fields of RunOptions as keyword arguments, for type checkers and editors."""

    dtype: Dtype | Literal["auto"]
    device: Literal["auto", "cuda", "cpu"]
    profile: str | Path | HardwareProfile
    batch_size: int | Literal["auto"]
    max_batch_size: int
    max_decode_step: float | None
    max_model_len: int | None
    expected_tokens: int
    expected_prompt: int | None
    expected_run: ExpectedRun | None
    policy: Policy | None
    needs_tokenizer: bool
    chat_template: str | None
    reasoning: str
    load_format: LoadFormat
    format: str
    popularity: str
    choices: str
    speculate: str
    threads: int | None
    started: datetime | None


class Keywords(RunKeywords, total=False):
    """Keyword arguments of LLM: those of RunOptions, and the ones of vLLM's LLM in _NEUTRAL."""

    disable_log_stats: bool
    pipeline_parallel_size: int
    seed: int
    tensor_parallel_size: int
    tokenizer_mode: str
    trust_remote_code: bool


def run_options(given: Mapping[str, Any], run: RunOptions | None = None) -> RunOptions:
    """`run` with the options in `given`, keyword arguments of LLM; some may be vLLM's (_NEUTRAL).

    Raises UsageError for other names, and for invalid values.
    """
    names = [field.name for field in fields(RunOptions)]
    others = {name: value for name, value in given.items() if name not in names}
    refuse_unsupported(others, _NEUTRAL, ("model", *names, "on_rules", "on_allocate", "on_load"))
    known = {name: value for name, value in given.items() if name in names}
    if known.get("policy", ...) is None:
        del known["policy"]
    return replace(run or RunOptions(), **known)
