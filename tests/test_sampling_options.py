"""Penalties, biases, bad words, min_p and min_tokens of whole requests, in rows and in Python."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.engine import Admission, SwapSpace
from dakrun.llm import LLM
from dakrun.plan import Policy
from dakrun.requests import BadRow, PromptRules, Request, StopStrings, Tokenizer

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama-gqa3-tied", tmp_path_factory.mktemp("options"))


def load(path: Path, batch_size: int = 6) -> LLM:
    return LLM(
        path, device="cpu", batch_size=batch_size, max_model_len=160, expected_prompt=20,
        expected_tokens=10, policy=Policy(offload_ratio=0.3, kv_offload_ratio=0.5),
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return load(path)


def tokens(llm: LLM, **params: Any) -> tuple[int, ...]:
    return llm.generate([PROMPT], SamplingParams(max_tokens=40, **params))[0].token_ids


def test_they_give_the_tokens_of_transformers(path: Path, llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    free = tokens(llm)
    words = [[free[2]], list(free[4:7]), [10, free[0]]]
    given = {"repetition_penalty": 1.4, "min_new_tokens": 12, "bad_words_ids": words}
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, eos_token_id=free[1],
            **given,
        )[0, len(PROMPT) :].tolist()  # fmt: skip
    ours = {"repetition_penalty": 1.4, "min_tokens": 12, "bad_words": words}
    found = tokens(llm, stop_token_ids=[free[1]], **ours)
    assert list(found) == wanted and len(found) >= 12
    assert found != free[: len(found)]


def test_what_each_does(llm: LLM) -> None:
    free = tokens(llm)
    assert tokens(llm, logit_bias={77: 100.0}) == (77,) * 40
    assert len(set(tokens(llm, logit_bias={77: 30.0}, frequency_penalty=2.0))) > 5
    once = tokens(llm, logit_bias={77: 30.0}, presence_penalty=2.0, repetition_penalty=1e6)
    assert once.count(77) == 1
    assert tokens(llm, temperature=3.0, min_p=1.0) == free
    assert tokens(llm, temperature=3.0, min_p=0.9) != tokens(llm, temperature=3.0)
    kept = tokens(llm, min_tokens=20, stop_token_ids=sorted(set(free[:20])))
    assert len(kept) >= 20 and not set(kept[:20]) & set(free[:20])


def options() -> list[Request]:
    chance = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "frequency_penalty": 0.8, "presence_penalty": -0.2},
        {},
        {"temperature": 1.0, "min_p": 0.1, "logit_bias": dict.fromkeys(range(3, 40), 2.0)},
        {"bad_words": [[i, j] for i in range(3, 20) for j in range(20, 60)], "min_tokens": 1},
        {"temperature": 1.0, "seed": 3},
    ]
    return [
        Request(
            id=f"r{i}",
            line=i + 1,
            prompt_ids=tuple(chance.choices(range(3, 300), k=chance.randint(1, 100))),
            params=SamplingParams(
                max_tokens=chance.randint(1, 59), ignore_eos=True, **kinds[i % len(kinds)]
            ),
        )
        for i in range(24)
    ]


def test_a_row_does_not_depend_on_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how often it gave up its slot; some go on from copies of their blocks, some do not."""
    with load(path, 1) as llm:
        alone = {one.id: one.token_ids for one in llm.stream(options())}
    monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
    with load(path) as llm:
        llm.engine.preemption.swap = SwapSpace(llm.engine.runner.cache, 1)
        llm.engine.preemption.swap.open()
        llm.engine.preemption.swap.wait()
        assert {one.id: one.token_ids for one in llm.stream(options())} == alone
        stats = llm.engine.stats
        assert 0 < stats.swapped < stats.preempted


def test_stop_strings_are_searched_behind_min_tokens() -> None:
    words = ["one ", "stop ", "two ", "st", "op ", "three ", "stop", " end"]

    def decode(ids: Any) -> str:
        return "".join(words[i] for i in ids)

    def hits(after: int) -> list[int]:
        finder = StopStrings(("stop",), decode, after=after)
        return [n for n in range(1, 9) if finder.hit(range(n))]

    assert hits(0)[0] == hits(1)[0] == 2 and hits(3)[0] == 5
    assert hits(2)[0] == 5 and hits(4) == hits(6) == [7, 8]
    finder = StopStrings(("stop",), decode, after=2)
    assert finder.hit(range(5)) and finder.cut(decode(range(5))) == "one stop two "


@pytest.fixture(scope="module")
def rules() -> PromptRules:
    tokenizer = Tokenizer.load(MODEL)
    return PromptRules(vocab_size=64, max_model_len=99, max_positions=99, tokenizer=tokenizer)


def test_bad_words_become_tokens_with_and_without_a_space(rules: PromptRules) -> None:
    assert rules.tokenizer is not None

    def ids(text: str) -> tuple[int, ...]:
        return rules.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]

    given = SamplingParams(bad_words=["five six", (7, 9)])
    found = rules.checked_params(given).bad_words
    assert set(found) == {ids("five six"), ids(" five six"), (7, 9)}
    plain = SamplingParams(stop="x")
    assert rules.checked_params(plain) is plain
    without = PromptRules(vocab_size=64, max_model_len=99, max_positions=99)
    with pytest.raises(BadRow, match="bad_words as text need the model's tokenizer"):
        without.checked_params(given)


def run(*rows: dict[str, Any]) -> list[Any]:
    """The tokens of each row, or its error's code and message."""
    text = "".join(json.dumps({"max_tokens": 4, **row}) + "\n" for row in rows)
    command = ["generate", "--model", str(MODEL), "-i", "-", "-o", "-", "--device", "cpu"]
    result = CliRunner().invoke(main, command, input=text)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(rows), result.stderr
    return [
        row["token_ids"]
        if "token_ids" in row
        else f"{row['error']['code']}: {row['error']['message']}"
        for row in sorted(found, key=lambda row: int(row["id"].removeprefix("line-")))
    ]


def test_bad_values_are_errors_of_their_rows_alone() -> None:
    prompt = "seven plus eighteen equals"
    free, *errors, biased, worded, blocked = run(
        {"prompt": prompt},
        {"prompt": prompt, "logit_bias": {"99999999": 1}},
        {"prompt": prompt, "stop_token_ids": [5, MODEL_VOCABULARY]},
        {"prompt": prompt, "stop_token_ids": [5, -1]},
        {"prompt": prompt, "min_p": -1},
        {"prompt": prompt, "presence_penalty": "x"},
        {"prompt": prompt, "repetition_penalty": 0},
        {"prompt": prompt, "bad_words": [[]]},
        {"prompt": prompt, "min_tokens": 5},
        {"prompt": prompt, "logit_bias": {"5": 100}, "ignore_eos": True},
        {"prompt": prompt, "bad_words": ["twenty"]},
        {"prompt": prompt, "bad_words": [[token] for token in range(MODEL_VOCABULARY)]},
    )
    wanted = [
        f"logit_bias has token id 99999999, not in the model's vocabulary of {MODEL_VOCABULARY}",
        f"stop_token_ids has token id {MODEL_VOCABULARY}, not in the model's vocabulary of "
        f"{MODEL_VOCABULARY}",
        "stop_token_ids is [5, -1]; stop_token_ids must be made of token ids, from 0",
        "min_p is -1; min_p must be a number from 0 to 1",
        "presence_penalty is 'x'; presence_penalty must be a number from -2 to 2",
        "repetition_penalty is 0; repetition_penalty must be a number from 1e-06 to 1e+06",
        "bad_words is [[]]; bad_words must be made of strings that are not blank and lists of",
        "min_tokens is 5, above max_tokens, 4; min_tokens must be at most max_tokens",
    ]
    for error, said in zip(errors, wanted, strict=True):
        assert error.startswith(f"invalid_field: {said}")
    assert biased == [5] * 4
    assert worded[0] != free[0]
    assert blocked.startswith(
        "no_token_allowed: the row's options forbid every token for the token"
    )


MODEL_VOCABULARY = json.loads((MODEL / "config.json").read_text())["vocab_size"]
