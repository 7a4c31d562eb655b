"""The sampling parameters of a request, and options of other programs that change nothing here.

Knows neither prompts nor tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dakrun.errors import UsageError, check_count, check_number, invalid_value

MAX_LOGPROBS = 20  # maximum of SamplingParams.logprobs
MAX_SEED_BITS = 96
SEED_BITS = 64  # of the seed of a request with several choices: their numbers are added above them

# Sampling options that are not supported, and their values that change nothing.
NEUTRAL_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
_NEUTRAL_IN_PYTHON: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_SAMPLING,
    "bad_words": ([], ()),
    "detokenize": (True,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
}


@dataclass(frozen=True, init=False)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Temperature 0 is greedy; top_k 0 (or -1) and top_p 1 keep all tokens. A request ends at a stop
    string, at `max_tokens`, at one of `stop_token_ids`, or at an end-of-sequence token unless
    `ignore_eos`. With `max_tokens` None it may fill the model's positions, or max_model_len.
    `stop` is a string or several. Stop strings are searched in the text with special tokens
    spelled out. The result depends on `seed`, of up to 96 bits (None is 0), and on the request, not
    on the other requests in the batch. A prompt of the Python API gets `n` completions, with a
    seed each. With `logprobs`, a number up to MAX_LOGPROBS, the result has for each new token its
    log-probability, and those of this many likeliest tokens in its place.

    Other sampling options of vLLM are taken where their value changes nothing. Raises UsageError,
    which names the option, for any other, and for wrong values.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    n: int

    def __init__(
        self,
        *,
        max_tokens: int | None = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Sequence[int] | None = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        n: int = 1,
        **other: Any,
    ) -> None:
        refuse_unsupported(other, _NEUTRAL_IN_PYTHON, [field.name for field in fields(self)])
        count = check_count("logprobs", logprobs, 0, or_one_of=(None,))
        if count is not None and count > MAX_LOGPROBS:
            raise invalid_value("logprobs", count, f"at most {MAX_LOGPROBS}")
        top_k = check_count("top_k", top_k, -1)
        seed = check_count("seed", 0 if seed is None else seed, 0)
        n = check_count("n", n)
        bits = MAX_SEED_BITS if n == 1 else SEED_BITS
        if seed >> bits:
            among = "" if n == 1 else f" with n {n}"
            raise UsageError(
                f"seed has {seed.bit_length()} bits{among}", hint=f"at most {bits} are read"
            )
        top_p = check_number("top_p", top_p, 0.0, 1.0)
        if top_p == 0:
            raise invalid_value("top_p", 0, "above 0")
        if not isinstance(ignore_eos, bool):
            raise invalid_value("ignore_eos", ignore_eos, "a bool")
        values = {
            "max_tokens": check_count("max_tokens", max_tokens, or_one_of=(None,)),
            "temperature": check_number("temperature", temperature, 0.0, 100.0),
            "top_k": max(0, top_k),
            "top_p": top_p,
            "seed": seed,
            "stop": _stop_strings(stop),
            "stop_token_ids": _stop_tokens(stop_token_ids),
            "ignore_eos": ignore_eos,
            "logprobs": count,
            "n": n,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def limit(self, room: int) -> int:
        """The most tokens of a completion that has room for `room` of them."""
        return room if self.max_tokens is None else min(self.max_tokens, room)


def is_neutral(name: str, value: object, table: Mapping[str, tuple[object, ...]]) -> bool:
    """Whether an unsupported option changes nothing: 0 and 0.0 are equal, false is not."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in table.get(name, ())
    )


def refuse_unsupported(
    given: Mapping[str, object],
    neutral: Mapping[str, tuple[object, ...]],
    supported: Iterable[str],
) -> None:
    """Raise UsageError that names the first option in `given` which is not None or `neutral`."""
    for name, value in given.items():
        if value is None or is_neutral(name, value, neutral):
            continue
        hint = f"leave it out; the options are {', '.join(supported)}"
        if same := neutral.get(name):
            hint = f"leave it out, or give {same[0]!r}, which changes nothing"
        raise UsageError(f"{name} is not supported", hint=hint)


def _stop_strings(stop: object) -> tuple[str, ...]:
    given = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(given, tuple | list):
        raise invalid_value("stop", stop, "a string, a list of strings or None")
    if not all(isinstance(text, str) and text for text in given):
        raise invalid_value("stop", list(given), "made of non-empty strings")
    return tuple(given)


def _stop_tokens(ids: object) -> tuple[int, ...]:
    given = () if ids is None else ids
    if not isinstance(given, tuple | list):
        raise invalid_value("stop_token_ids", ids, "a list of token ids or None")
    if not all(type(token) is int and token >= 0 for token in given):
        raise invalid_value("stop_token_ids", list(given), "made of token ids, from 0")
    return tuple(given)
