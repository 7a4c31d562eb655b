"""Options by which the tokens of a request are chosen, and by which it ends.

Knows what each option may be; knows neither models nor rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dakrun.errors import UsageError, check_count, check_number, invalid_value, refuse_unsupported
from dakrun.grammars import StructuredOutputsParams

MAX_LOGPROBS = 20  # maximum of SamplingParams.logprobs and prompt_logprobs
MAX_BIASES = 1024  # tokens in SamplingParams.logit_bias
MAX_BAD_TOKENS = 4096  # tokens of SamplingParams.bad_words, in all
MAX_BIAS = 100.0
MAX_REPETITION = 1e6  # of repetition_penalty and its inverse: float16 logits stay finite
# Options of SamplingParams by which the choice differs from that of the model's own logits.
ADJUSTING = (
    *("min_p", "min_tokens", "bad_words", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
MAX_SEED_BITS = 96
SEED_BITS = 64  # of the seed of a request with several choices: their numbers are added above them

# Sampling options that are not supported, and their values that change nothing.
NEUTRAL_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_SAMPLING,
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
    spelled out. The result depends on `seed`, of up to 96 bits (None is 0), and on the request and
    its id, not on the other requests in the batch. The id of a prompt of the Python API is its
    number in the list; such a prompt gets `n` completions, with a seed each. With `logprobs`, a
    number up to MAX_LOGPROBS, the result has for each new token its log-probability, and those of
    this many likeliest tokens there. With `prompt_logprobs` it has them for each token of
    the prompt but the first; `max_tokens` may then be 0.

    `min_p` keeps tokens that have at least this part of the likeliest one's probability. None of
    the first `min_tokens` tokens is an end-of-sequence token or one of `stop_token_ids`, and stop
    strings are searched behind them. Of `bad_words`, which are strings or sequences of token ids,
    the last token is never chosen behind the others. `logit_bias` has a number for each of some
    token ids, which is added to the token's logit. Then `repetition_penalty` divides the positive
    logits, and multiplies the others, of tokens in the prompt or the completion.
    `frequency_penalty` is subtracted for each time that a token is in the completion, and
    `presence_penalty` once. Log-probabilities are the model's own all the same.

    `structured_outputs` is the form that an answer must have, StructuredOutputsParams or a mapping
    with its keywords. An answer with a form ends where its grammar does, also with `ignore_eos`.
    A thought that has `thinking_token_budget` tokens is closed.

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
    prompt_logprobs: int | None
    n: int
    min_p: float
    min_tokens: int
    bad_words: tuple[str | tuple[int, ...], ...]
    logit_bias: tuple[tuple[int, float], ...]  # in the order of the ids
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    structured_outputs: StructuredOutputsParams | None
    thinking_token_budget: int | None

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
        prompt_logprobs: int | None = None,
        n: int = 1,
        min_p: float = 0.0,
        min_tokens: int = 0,
        bad_words: Sequence[str | Sequence[int]] | None = (),
        logit_bias: Mapping[int | str, float] | Sequence[tuple[int, float]] | None = (),
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        thinking_token_budget: int | None = None,
        **other: Any,
    ) -> None:
        refuse_unsupported(other, _NEUTRAL, [field.name for field in fields(self)])
        logprobs = _count_of_likeliest("logprobs", logprobs)
        prompt_logprobs = _count_of_likeliest("prompt_logprobs", prompt_logprobs)
        if max_tokens == 0 and prompt_logprobs is None:
            least = "at least 1, or 0 with prompt_logprobs (with echo in a Batch row)"
            raise invalid_value("max_tokens", max_tokens, least)
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
            "max_tokens": check_count("max_tokens", max_tokens, 0, or_one_of=(None,)),
            "temperature": check_number("temperature", temperature, 0.0, 100.0),
            "top_k": max(0, top_k),
            "top_p": top_p,
            "seed": seed,
            "stop": _stop_strings(stop),
            "stop_token_ids": _stop_tokens(stop_token_ids),
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "n": n,
            "min_p": check_number("min_p", min_p, 0.0, 1.0),
            "min_tokens": check_count("min_tokens", min_tokens, 0),
            "bad_words": _bad_words(bad_words),
            "logit_bias": _logit_bias(logit_bias),
            "repetition_penalty": check_number(
                "repetition_penalty", repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION
            ),
            "frequency_penalty": check_number("frequency_penalty", frequency_penalty, -2.0, 2.0),
            "presence_penalty": check_number("presence_penalty", presence_penalty, -2.0, 2.0),
            "structured_outputs": None
            if structured_outputs is None
            else StructuredOutputsParams.of(structured_outputs),
            "thinking_token_budget": check_count(
                "thinking_token_budget", thinking_token_budget, 0, or_one_of=(None,)
            ),
        }
        least, most = values["min_tokens"], values["max_tokens"]
        if most is not None and least > most:
            raise UsageError(
                f"min_tokens is {least}, above max_tokens, {most}",
                hint="min_tokens must be at most max_tokens",
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on which tokens the prompt and the completion have."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether logits of single tokens are changed, or tokens forbidden."""
        return self.penalizes or bool(self.min_tokens or self.bad_words or self.logit_bias)

    def limit(self, room: int) -> int:
        """The most tokens of a completion that has room for `room` of them."""
        return room if self.max_tokens is None else min(self.max_tokens, room)


def _count_of_likeliest(name: str, given: object) -> int | None:
    count: int | None = check_count(name, given, 0, or_one_of=(None,))
    if count is not None and count > MAX_LOGPROBS:
        raise invalid_value(name, count, f"at most {MAX_LOGPROBS}")
    return count


def _stop_strings(stop: object) -> tuple[str, ...]:
    given = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(given, tuple | list):
        raise invalid_value("stop", stop, "a string, a list of strings or None")
    if not all(isinstance(text, str) and text for text in given):
        raise invalid_value("stop", list(given), "made of non-empty strings")
    return tuple(given)


def _bad_words(given: object) -> tuple[str | tuple[int, ...], ...]:
    words = () if given is None else given
    if not isinstance(words, tuple | list):
        raise invalid_value("bad_words", given, "a list of strings and of lists of token ids")
    found: list[str | tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str) and word.strip():
            found.append(word)
        elif isinstance(word, tuple | list) and word and all(map(_is_token, word)):
            found.append(tuple(word))
        else:
            expected = "made of strings that are not blank and lists of token ids, not empty"
            raise invalid_value("bad_words", list(words), expected)
    tokens = sum(1 if isinstance(word, str) else len(word) for word in found)
    if tokens > MAX_BAD_TOKENS:
        raise UsageError(
            f"bad_words have {tokens} tokens", hint=f"at most {MAX_BAD_TOKENS} are supported"
        )
    return tuple(found)


def _logit_bias(given: object) -> tuple[tuple[int, float], ...]:
    """The biases by token in a mapping, whose keys may be strings as in JSON, or in pairs."""
    biases = dict(given or ()) if isinstance(given, Mapping | tuple | None) else given
    if not isinstance(biases, dict):
        raise invalid_value("logit_bias", given, "numbers by token id")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not _is_token(token):
            raise invalid_value("logit_bias", {key: bias}, "numbers by token id, from 0")
        if token in found:
            raise UsageError(f"logit_bias has token {token} twice", hint="name each token once")
        name = f"logit_bias of token {token}"
        found[token] = check_number(name, bias, -MAX_BIAS, MAX_BIAS)
    if len(found) > MAX_BIASES:
        raise UsageError(
            f"logit_bias has {len(found)} tokens", hint=f"at most {MAX_BIASES} are supported"
        )
    return tuple(sorted(found.items()))


def _is_token(value: object) -> bool:
    return type(value) is int and value >= 0


def _stop_tokens(ids: object) -> tuple[int, ...]:
    given = () if ids is None else ids
    if not isinstance(given, tuple | list):
        raise invalid_value("stop_token_ids", ids, "a list of token ids or None")
    if not all(map(_is_token, given)):
        raise invalid_value("stop_token_ids", list(given), "made of token ids, from 0")
    return tuple(given)
