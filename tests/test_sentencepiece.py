"""A tokenizer.model alone: its ids and texts are sentencepiece's, special tokens are found."""

import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dakrun.cli import main
from dakrun.demo import MODEL
from dakrun.errors import CannotRun
from dakrun.requests import Tokenizer
from dakrun.requests.sentencepiece_model import SentencePieceTokenizer

CODE = "def f(x):\n    if x:\n        return  1\n"
TEXTS = [
    *("a", " lead", "  two", "three   spaces  ", CODE, "\ttab\n\n", "é 中文 🎉", "▁", "", " "),
    "the end</s",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    "{{ eos_token }}"
)


@pytest.fixture(scope="module")
def model() -> bytes:
    """A model like Llama's: BPE with byte fallback, which keeps all spaces; two control tokens."""
    spm = pytest.importorskip("sentencepiece")
    words = [
        "the",
        "end",
        "of",
        "a",
        "text",
        "is",
        "here",
        "and",
        "there,",
        "def",
        "return",
        "if",
        "else",
        "lead",
        "two",
        "three",
        "spaces",
    ]
    lines = [f"{a} {b}  {a}{b}    {b}" for a in words for b in words] + [CODE] * 50
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=made,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        control_symbols=["[INST]", "[/INST]"],
        minloglevel=2,
    )
    return made.getvalue()


def load(folder: Path, model: bytes, **config: Any) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def processor(model: bytes) -> Any:
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}])
def test_ids_and_texts_are_those_of_sentencepiece(
    tmp_path: Path, model: bytes, config: dict[str, Any]
) -> None:
    tokenizer, own = load(tmp_path, model, **config), processor(model)
    assert (own.unk_id(), own.bos_id(), own.eos_id()) == (0, 1, 2)
    assert any("\u2581\u2581" in own.id_to_piece(i) for i in own.encode(CODE))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert list(ids) == [1, *own.encode(text)]
        shown = text.replace("\u2581", " ")  # as sentencepiece has it
        assert tokenizer.decode(ids) == own.decode(list(ids)) == shown
        assert tokenizer.decode([*ids, 2]) == shown
    assert tokenizer.eos_token_id == 2 and not tokenizer.has_chat_template


@pytest.mark.parametrize("legacy", [None, True, False])
def test_text_behind_a_special_token(tmp_path: Path, model: bytes, legacy: bool | None) -> None:
    tokenizer, own = load(tmp_path, model, legacy=legacy, tokenizer_class=None), processor(model)
    ids = list(tokenizer.encode("lead</s> two[/INST]two"))
    two, control = own.piece_to_id("\u2581two"), own.piece_to_id("[/INST]")
    first, behind = ids[: ids.index(2)], ids[ids.index(2) + 1 :]
    assert first == [1, own.piece_to_id("\u2581lead")]
    if legacy is False:  # only the whole text gets a space in front of it
        assert behind[:2] == [two, control]
        assert "".join(map(own.id_to_piece, behind[2:])) == "two"
        assert tokenizer.encode("</s>a")[1:] == (2, own.piece_to_id("a"))
    else:
        assert behind == [*own.encode(" two"), control, two]
        assert "".join(map(own.id_to_piece, behind[:-2])) == "\u2581\u2581two"
        assert tokenizer.encode("</s>a")[1:] == (2, own.piece_to_id("\u2581a"))


def test_ends_and_added_tokens(tmp_path: Path, model: bytes) -> None:
    end = {"content": "<end>", "special": True, "rstrip": True}
    tool = {"content": "<tool>", "special": False, "lstrip": True}
    tokenizer = load(
        tmp_path,
        model,
        add_bos_token=False,
        add_eos_token=True,
        eos_token={"__type": "AddedToken", "content": "<end>"},
        pad_token=None,
        added_tokens_decoder={"400": end, "401": tool},
    )
    own = processor(model)
    text = "the <end>\n <tool>two"
    assert list(tokenizer.encode(text)) == [*own.encode("the "), 400, 401, *own.encode("two"), 400]
    assert tokenizer.eos_token_id == 400
    ids = [*own.encode("a"), 400, 401, *own.encode("two"), 999_999]
    assert tokenizer.decode(ids) == "a<tool> two"
    assert tokenizer.token_text(400) == "<end>" and tokenizer.token_text(401) == "<tool>"
    assert tokenizer.token_text(own.piece_to_id("\u2581two")) == " two"


def test_added_tokens_of_older_folders(tmp_path: Path, model: bytes) -> None:
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 400, "<more>": 401}')
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": "<x>"}')
    tokenizer = load(tmp_path, model, eos_token="</s>")
    assert tokenizer.eos_token_id == 402  # one that no file numbers comes last
    assert list(tokenizer.encode("<more><x><pad>")) == [1, 401, 402, 400]
    assert tokenizer.decode([400, 401, 402]) == "<more>"


@pytest.mark.parametrize("in_file", [True, False])
def test_chats(tmp_path: Path, model: bytes, in_file: bool) -> None:
    if in_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    other = "{{ messages }}" if in_file else TEMPLATE
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": other}]
    tokenizer, own = load(tmp_path, model, chat_template=named), processor(model)
    begin, end = own.piece_to_id("[INST]"), own.piece_to_id("[/INST]")
    ids = list(tokenizer.chat([{"role": "user", "content": "  two\n"}]))
    assert ids == [1, begin, *own.encode("   two\n "), end, 2]


def test_a_completion_continues_its_prompt(tmp_path: Path, model: bytes) -> None:
    tokenizer, own = load(tmp_path, model), processor(model)
    new = own.encode("  two é 🎉")
    for context in ("the end", CODE):
        continuation = tokenizer.continuation(tokenizer.encode(context))
        assert continuation.text(new) == "   two é 🎉"
        assert continuation.text([*new, 2]) == "   two é 🎉"
    assert tokenizer.continuation([1], is_chat=True).text(own.encode("two")) == "two"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer.model": "IQ== 0\nIg== 1\n"}, "tokenizer.model is not a SentencePiece model"),
        ({"tokenizer_config.json": '{"tokenizer_class": "XLNetTokenizer"}'}, "XLNetTokenizer"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: "),
        ({"added_tokens.json": "[]"}, "added_tokens.json is not a JSON object"),
        ({"tokenizer_config.json": '{"eos_token": 3}'}, "3 is not a token"),
    ],
)
def test_what_cannot_be_loaded(
    tmp_path: Path, model: bytes, files: dict[str, str], reason: str
) -> None:
    load(tmp_path, model)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CannotRun, match="the tokenizer cannot be loaded") as raised:
        Tokenizer.load(tmp_path)
    assert reason in str(raised.value)


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    monkeypatch.setattr("dakrun.requests.sentencepiece_model.find_spec", lambda name: None)
    loaded: list[object] = []
    monkeypatch.setattr("dakrun.llm.LLM.__init__", lambda *_, **__: loaded.append(1))
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\n")
    out = tmp_path / "o.jsonl"
    args = ["generate", "--model", str(tmp_path), "-i", str(prompts), "-o", str(out)]
    result = CliRunner().invoke(main, [*args, "--device", "cpu"])
    assert result.exit_code == 3 and not loaded and not out.exists()
    error, hint = result.stderr.splitlines()
    assert "needs sentencepiece, which is not installed" in error
    assert hint == "hint: pip install 'dakrun[sentencepiece]'"


def test_other_folders_do_not_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dakrun.requests.sentencepiece_model.find_spec", lambda name: None)
    tokenizer = Tokenizer.load(MODEL)
    assert not isinstance(tokenizer._tokenizer, SentencePieceTokenizer)
    if importlib.util.find_spec("sentencepiece") is None:
        assert "sentencepiece" not in sys.modules
