"""Grammars of forms of answers: compiled once each, beside other work; and guides along them."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import make_tokenizer_files

from dakrun.errors import UsageError
from dakrun.grammars import (
    MAX_COMPILED,
    Grammars,
    Guidance,
    StructuredOutputsParams,
    compiling,
    is_valid,
)
from dakrun.requests import Tokenizer

VOCAB, END = 331, 2  # the tokenizer has 261 tokens


@pytest.fixture
def grammars(tmp_path: Path) -> Grammars:
    return Grammars(Tokenizer.load(make_tokenizer_files(tmp_path)).as_json, VOCAB, [END])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are compiled from now on."""
    found: list[str] = []
    real = compiling.llguidance_grammar

    def counting(form: StructuredOutputsParams) -> str:
        found.append(form.source)
        return real(form)

    monkeypatch.setattr(compiling, "llguidance_grammar", counting)
    return found


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def test_each_form_is_compiled_once(grammars: Grammars, compiled: list[str]) -> None:
    forms = [regex(f"a{{{n}}}") for n in range(1, 20)]
    grammars.prepare(forms)
    grammars.prepare(forms)
    for form in (*forms, *reversed(forms)):
        assert not grammars.matcher(form).is_error()
    assert sorted(compiled) == sorted(form.source for form in forms)
    for _ in range(3):
        with pytest.raises(UsageError, match="unclosed group") as caught:
            grammars.matcher(regex("("))
        assert caught.value.hint and len(compiled) == len(forms) + 1
        assert len(list(frames(caught.tb))) < 5


def frames(trace: Any) -> Any:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def test_only_so_many_are_kept(
    grammars: Grammars, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_COMPILED", 3)
    assert MAX_COMPILED > 3
    grammars.prepare(regex(text) for text in "abcde")  # d and e are not
    for text in "abcdeabcde":
        grammars.matcher(regex(text))
    assert len(compiled) == 3 + 2 + 5


def test_a_form_that_waits_is_compiled_by_who_needs_it(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, busy, go_on = compiling.llguidance_grammar, threading.Event(), threading.Event()

    def slow(form: StructuredOutputsParams) -> str:
        if form.source == "a":
            busy.set()
            assert go_on.wait(20)
        return real(form)

    monkeypatch.setattr(compiling, "llguidance_grammar", slow)
    grammars.prepare([regex("a"), regex("b")])
    assert busy.wait(20)
    assert not grammars.matcher(regex("b")).is_error()
    go_on.set()
    assert not grammars.matcher(regex("a")).is_error()


def allowed(guide: Any) -> set[int]:
    mask = np.empty((VOCAB + 31) // 32, dtype=np.int32)
    guide.fill(mask)
    return {int(t) for t in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


def test_tokens_beyond_the_tokenizer_are_forbidden(grammars: Grammars) -> None:
    found = allowed(Guidance(grammars, regex("(.|\n)*")).guide())
    assert END in found and max(found) < 261 < VOCAB


@pytest.mark.parametrize("blanks", [0, 1, 8, 9])
def test_blanks_between_tokens_of_json_are_bounded(grammars: Grammars, blanks: int) -> None:
    form = StructuredOutputsParams(json={"type": "array", "items": {"const": 1}})
    assert grammars.accepts(form, f"[1,{' ' * blanks}1]") == (blanks <= 8)


def test_a_grammar_wins_over_the_start_of_a_thought(grammars: Grammars) -> None:
    """A `<` that the grammar allows begins the answer, another one a thought."""
    tokens = grammars.tokenizer.tokenize_str("<think>")
    markers = "<think>", "</think>"
    for form, state in ((regex("<a"), "answer"), (regex("a"), "opening")):
        guide = Guidance(grammars, form, markers).guide()
        assert tokens[0] in allowed(guide)
        guide.accept(tokens[0])
        assert guide.state == state
    for token in tokens[1:]:
        assert allowed(guide) == {token}
        guide.accept(token)
    assert guide.state == "thought" and END not in allowed(guide)
    for token in grammars.tokenizer.tokenize_str("x</think>"):
        guide.accept(token)
    assert guide.state == "answer" and allowed(guide) == set(grammars.tokenizer.tokenize_str("a"))


def test_a_free_answer_may_begin_with_a_thought_or_not(grammars: Grammars) -> None:
    def state(text: str) -> str:
        tokens = grammars.tokenizer.tokenize_str(text)
        guidance = Guidance(grammars, None, ("<think>", "</think>"), budget=30)
        return str(guidance.guide(tokens).state)

    assert state("") == state("<thi") == state("\n <") == "opening"
    assert state("Hi") == state("<b>") == state("<think>x</think>") == "answer"
    assert state("<think>") == state("\n<think>ab") == "thought"


def test_validity() -> None:
    form = StructuredOutputsParams(json={"type": "array", "uniqueItems": True}, strict=False)
    assert is_valid(form, "[1, 2]") and not is_valid(form, "[1, 1]")
    assert not is_valid(form, "[1") and not is_valid(form, '{"a": 1}')
    remote = StructuredOutputsParams(json={"$ref": "http://127.0.0.1:9/x"}, strict=False)
    assert not is_valid(remote, "1")
