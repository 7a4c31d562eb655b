"""Texts of tokens behind their prompt, end tokens, and stop strings in special tokens."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from dakrun import LLM, SamplingParams
from dakrun.demo import MODEL
from dakrun.errors import UsageError
from dakrun.requests import PromptRules, StopStrings, Tokenizer
from dakrun.requests.continuation import Continuation
from dakrun.requests.native_rows import parse_native
from dakrun.requests.openai_rows import parse_batch
from dakrun.requests.prompts import BadRow

BYTE = 8  # id of byte 0


@pytest.fixture(scope="module")
def llama() -> tokenizers.Tokenizer:
    """As Llama 2's: the decoder drops a space at the start of a text."""
    words = ["<s>", "</s>", "\u2581", "\u2581a", "a", "b", "\u2581b", "\u2581\u2581"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<s>", "</s>"])
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def behind(llama: tokenizers.Tokenizer, *context: int) -> Continuation:
    return Continuation(llama.decode, {0: "<s>", 1: "</s>"}, context)


@pytest.mark.parametrize(
    ("context", "ids", "text", "spelled", "offsets"),
    [
        ([4], [3, 4], " aa", " aa", [0, 2]),
        ([], [3, 4], "aa", "aa", [0, 1]),  # a chat, or nothing before it
        ([4], [1, 3, 5, 1, 6], " ab b", "</s> ab</s> b", [0, 0, 2, 3, 3]),
        ([], [1, 3, 5], "ab", "</s>ab", [0, 0, 1]),
        ([4], [7, 4], "  a", "  a", [0, 2]),
        ([4], [BYTE + 0xC3, BYTE + 0xA9, 4], "\u00e9a", "\u00e9a", [0, 0, 1]),
        ([4, BYTE + 0xC3], [BYTE + 0xA9, 4], "\u00e9a", "\u00e9a", [0, 1]),
    ],
)
def test_the_text_behind_a_prompt(
    llama: tokenizers.Tokenizer,
    context: list[int],
    ids: list[int],
    text: str,
    spelled: str,
    offsets: list[int],
) -> None:
    made = behind(llama, *context)
    assert (made.text(ids), made.spelled(ids), made.offsets(ids)) == (text, spelled, offsets)


KHMER = "\u1781\u17d2\u1798\u17c2"  # characters of three bytes, none of them in the vocabulary


@pytest.mark.parametrize("before", range(1, 5))
@pytest.mark.parametrize("partial", range(3))  # bytes of the prompt's last character
def test_a_prompt_of_byte_tokens_spoils_no_text(
    llama: tokenizers.Tokenizer, tmp_path: Path, before: int, partial: int
) -> None:
    llama.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    )
    tokenizer = Tokenizer.load(tmp_path)
    prompt = [BYTE + byte for byte in KHMER[:before].encode()]
    new = [BYTE + byte for byte in (KHMER + "\n" + KHMER).encode()]
    made = tokenizer.continuation([*prompt, *new[:partial]])
    assert made.text(new[partial:]) == f"{KHMER}\n{KHMER}"
    finder = StopStrings(("\n",), made.spelled)
    ends = [n for n in range(1, len(new) + 1 - partial) if finder.hit(new[partial : partial + n])]
    assert ends[0] == 3 * len(KHMER) + 1 - partial
    assert made.text(new[partial : partial + ends[0]], finder) == KHMER
    starts = [at for at, char in enumerate(f"{KHMER}\n{KHMER}") for _ in char.encode()]
    assert made.offsets(new[partial:]) == starts[partial:]
    eos = tokenizer.eos_token_id
    assert made.text([*new[partial:], eos, *new[:12]]) == f"{KHMER}\n{KHMER}{KHMER}"
    # Cut inside a character, byte tokens are spoiled as transformers has it: those before are not.
    assert made.text(new[partial:11]) == tokenizer.decode(new[:11])


@pytest.mark.parametrize(
    ("stop", "ends", "text"),
    [("</s>", 3, " ab"), ("b</s", 3, " a"), ("</s> b", 4, " ab"), (" a", 1, ""), ("s> ", 4, " ab")],
)
def test_stop_strings_see_special_tokens_and_the_first_space(
    llama: tokenizers.Tokenizer, stop: str, ends: int, text: str
) -> None:
    made, ids = behind(llama, 4), [3, 5, 1, 6, 4]
    finder = StopStrings((stop,), made.spelled)
    assert next(n for n in range(1, 6) if finder.hit(ids[:n])) == ends
    assert made.text(ids[:ends], finder) == text


def test_a_completion_keeps_its_first_space_and_a_chat_does_not(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_like(tmp_path / "m"))
    prompt = tokenizer.encode("two plus three =")
    answer = tokenizer.encode("two plus three = five")[len(prompt) :]
    assert tokenizer.continuation(prompt).text(answer) == " five"
    assert tokenizer.continuation(prompt, is_chat=True).text(answer) == "five"
    assert tokenizer.continuation(prompt[:1]).text(answer) == "five"  # a begin token alone


def sentencepiece_like(folder: Path) -> Path:
    """The demo model with a tokenizer that marks words by a space before them."""
    shutil.copytree(MODEL, folder)
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["pre_tokenizer"] = found["decoder"] = {
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True,
    }  # fmt: skip
    vocab = found["model"]["vocab"].items()
    found["model"]["vocab"] = {(k if k[0] == "<" else "\u2581" + k): v for k, v in vocab}
    path.write_text(json.dumps(found))
    return folder


def test_generated_texts(tmp_path: Path) -> None:
    """End tokens are not shown; a stop token ends a text as a stop string does."""
    model = LLM(str(sentencepiece_like(tmp_path / "m")), device="cpu")
    prompt = "twenty plus three ="
    plain, stopped, ended, special = model.generate(
        [prompt] * 4,
        [
            SamplingParams(max_tokens=2, logprobs=0),
            SamplingParams(max_tokens=2, stop=(" twenty",)),
            SamplingParams(max_tokens=2, stop_token_ids=(24, 25, 26, 27, 28, 29)),
            SamplingParams(max_tokens=9, ignore_eos=True, stop=("</s>",)),
        ],
    )
    assert plain.text is not None and plain.text.startswith(" twenty")
    assert plain.text_offset == (0, len(" twenty"))
    assert (stopped.text, stopped.finish_reason, len(stopped.token_ids)) == ("", "stop", 1)
    assert plain.token_ids[0] in range(24, 30)
    assert (ended.text, ended.finish_reason, ended.token_ids) == ("", "stop", plain.token_ids[:1])
    assert special.finish_reason == "stop" and special.token_ids[-1] == 2
    assert special.text is not None and "</s>" not in special.text


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 5, [7, 2]), (None, 5, [5, 2]), ([2, 7], 5, [2, 7]), (None, [2], [2])],
)
def test_end_tokens_are_those_of_generation_and_the_tokenizer(
    tmp_path: Path, generation: object, config: object, expected: list[int]
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(MODEL, folder)
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        path = folder / name
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**found, "eos_token_id": value}))
    model = LLM(str(folder), device="cpu")
    assert list(model.plan.model.eos_token_ids) == expected
    model.generate(["two plus three ="], SamplingParams(max_tokens=1))
    assert model.report(1.0)["model"]["eos_token_ids"] == expected


def test_stop_token_ids_of_rows() -> None:
    rules = PromptRules(vocab_size=99, max_model_len=64, max_positions=64)
    native = {"prompt_token_ids": [1], "stop_token_ids": [3, 4]}
    batch = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": [1], "stop_token_ids": [3, 4]},
    }
    for found in (
        parse_native(native, SamplingParams(), rules),
        parse_batch(batch, SamplingParams(), rules),
    ):
        assert found[0].params.stop_token_ids == (3, 4)
    for wrong in (3, ["a"], [True], [1.5]):
        with pytest.raises(BadRow, match="stop_token_ids is not an array of integers"):
            parse_native({**native, "stop_token_ids": wrong}, SamplingParams(), rules)
    for below in ((-1,), (True,), [-3], 3):
        with pytest.raises(UsageError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=below)  # type: ignore[arg-type]
