"""What enters and leaves the engine: requests, completions, and rows that are neither."""

from dataclasses import dataclass
from typing import Literal

from dakrun.config import SamplingParams


@dataclass(frozen=True)
class Reply:
    """The format of a result row: native, or OpenAI's, which repeats the `model` of the request."""

    kind: Literal["native", "completion", "chat"] = "native"
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A tokenised prompt and how to continue it; `line` is its 1-based line in the input."""

    id: str
    line: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    reply: Reply = Reply()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. `text` ends before EOS or the stop string; None without a tokenizer.

    `ttft_s` is the time from the request's start to its first token, `tpot_s` the mean time of
    each further one (0 where there is none), both in seconds.
    """

    id: str
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    ttft_s: float
    tpot_s: float
    reply: Reply = Reply()


@dataclass(frozen=True, kw_only=True)
class RowError:
    """An input row that cannot be run: `code` is for programs, `message` for people."""

    id: str
    line: int
    code: str
    message: str
    reply: Reply = Reply()
