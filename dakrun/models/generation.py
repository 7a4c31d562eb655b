"""The sampling that a model's generation_config.json suggests.

Knows its keys; the end tokens in it are read by hf_config.py. Its lengths are not taken.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dakrun.config import SamplingParams
from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import read_json_object

FILE = "generation_config.json"
_TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Keys that change which tokens are taken, and their values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "penalty_alpha": (None, 0, 0.0),
    "num_beams": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "stop_strings": (None, [], ""),
    "sequence_bias": (None, [], {}),
    "guidance_scale": (None, 1, 1.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "dola_layers": (None,),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}


def suggestion(directory: Path) -> dict[str, Any]:
    """The sampling keys of `directory`'s generation_config.json that differ from greedy decoding.

    Where it asks for sampling and names no temperature, that is 1, as in transformers. Empty
    without the file. Raises UsageError if it is malformed.
    """
    path = directory / FILE
    if not path.is_file():
        return {}
    raw = read_json_object(path)
    found = {
        key: raw[key] for key, neutral in _NEUTRAL.items() if key in raw and raw[key] not in neutral
    }
    if raw.get("do_sample") is not True:
        return found
    warpers = {k: raw[k] for k in _TAKEN if k not in _NEUTRAL and raw.get(k) is not None}
    return {"temperature": 1.0, **warpers, **found}


def described(suggested: dict[str, Any]) -> str:
    """The keys and values for people."""
    return ", ".join(f"{key} {value}" for key, value in suggested.items())


def unsupported(suggested: dict[str, Any]) -> dict[str, Any]:
    """The suggested keys, with their values, that no request here can have."""
    return {key: value for key, value in suggested.items() if key not in _TAKEN}


def with_suggestion(
    params: SamplingParams, directory: Path, given: frozenset[str]
) -> SamplingParams:
    """`params` with what `directory` suggests, but for the fields `given` by the user.

    Raises UsageError if there is no generation_config.json or a value is not allowed, CannotRun if
    it asks for something that is not supported.
    """
    path = directory / FILE
    if not path.is_file():
        raise UsageError(f"{path}: no such file", hint="use --generation-config none")
    suggested = suggestion(directory)
    if others := unsupported(suggested):
        raise CannotRun(
            f"{path}: asks for {described(others)}, which is not supported",
            hint="use --generation-config none, with --temperature, --top-k and --top-p as it has",
        )
    taken = {key: value for key, value in suggested.items() if key not in given}
    try:
        return replace(params, **taken)
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}", hint=problem.hint) from None
