"""The tokenizer wrapper on tiny tokenizers made here, and stop strings across token boundaries."""

import gc
import json
import random
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from tiny_tokenizer import BYTES, SPECIAL, chat_tokenizer, make_tokenizer_files

from dakrun.errors import CannotRun, UsageError
from dakrun.requests import PromptRules, StopStrings, Tokenizer, chat_template
from dakrun.requests.prompts import BadRow

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ bos_token + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_files(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [len(SPECIAL) + BYTES.index(names[b]) for b in data]


def test_encodes_with_the_begin_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello") == (2, len(SPECIAL) + 256, *byte_ids(b"llo"))
    assert tokenizer.encode("") == (2,)


@pytest.mark.parametrize("text", ["hello", " two  spaces , kept ", "é🎉\n\x00", "he" * 3000])
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_texts_of_tokens(tokenizer: Tokenizer) -> None:
    """Leading spaces and the names of special tokens included."""
    first, second = (tokenizer.token_text(token) for token in byte_ids(b" a"))
    assert (first, second, tokenizer.token_text(len(SPECIAL) + 256)) == (" ", "a", "he")
    assert tokenizer.token_text(2) == "</s>"
    assert tokenizer.token_text(byte_ids("é".encode()[:1])[0]) == "\N{REPLACEMENT CHARACTER}"


def test_decode_skips_special_tokens_and_marks_incomplete_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([2, *byte_ids(b"a"), 1, *byte_ids(b"b"), 2]) == "ab"
    assert tokenizer.decode(byte_ids("é".encode()[:1])) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer files"),
        ({"tokenizer_config.json": "{}"}, "no tokenizer files"),
        ({"tokenizer.json": "{", "config.json": '{"model_type": "opt"}'}, "cannot be loaded ("),
        ({"tokenizer.json": "{}", "config.json": '{"model_type": "opt"}'}, "cannot be loaded ("),
    ],
)
def test_unusable_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CannotRun) as raised:
        Tokenizer.load(tmp_path)
    assert message in str(raised.value) and str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value) and "copy" in raised.value.hint


def test_a_wrong_config_is_not_blamed_on_the_tokenizer_alone(tmp_path: Path) -> None:
    make_tokenizer_files(tmp_path)
    config = {"model_type": "llama", "rms_norm_eps": "1e-6"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotRun, match="rms_norm_eps") as raised:
        Tokenizer.load(tmp_path)
    assert "config.json" in raised.value.hint


def test_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """All of them, without a copy of the weights; a template's mark is not in the chat."""
    plain = Tokenizer.load(make_tokenizer_files(tmp_path, chat_template=TEMPLATE))
    plain._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "</s>"}')
    (tmp_path / "model.safetensors").write_bytes(b"\xef\xbb\xbf")
    texts = [*tmp_path.glob("*.json"), *tmp_path.glob("*.jinja")]
    assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= {p.name for p in texts}
    for path in texts:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    marked = Tokenizer.load(tmp_path)
    assert marked.encode(" hello é") == plain.encode(" hello é")
    chat = [{"role": "user", "content": "hi"}]
    assert marked.chat(chat) == plain.chat(chat) and plain.decode(plain.chat(chat)) == "hi>"
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_missing_folder(tmp_path: Path) -> None:
    assert not Tokenizer.is_in(tmp_path / "none")
    with pytest.raises(CannotRun, match="no tokenizer files"):
        Tokenizer.load(tmp_path / "none")


def test_chat_uses_the_template(tmp_path: Path) -> None:
    chatty = Tokenizer.load(make_tokenizer_files(tmp_path, chat_template=TEMPLATE))
    ids = chatty.chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "b"}])
    assert ids == (2, *byte_ids(b"hi"), 2, *byte_ids(b"b>"))
    for messages in ([{"role": "tool", "content": "x"}], [{"role": "user"}], [1], []):
        with pytest.raises(UsageError, match="chat template cannot render"):
            chatty.chat(messages)  # type: ignore[arg-type]


HOSTILE = (
    "{% set text = messages[0]['content'] %}{% if text == 'endless' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if text == 'large' %}{{ text * 10**10 }}{% endif %}"
    "{% if text == 'long' %}{{ text * 10**7 }}{% endif %}{{ text }}"
)


def test_a_chat_template_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows before and after one that breaks a bound are as usual."""
    monkeypatch.setattr(chat_template, "LIMIT_S", 2.0)
    chatty = Tokenizer.load(make_tokenizer_files(tmp_path, chat_template=HOSTILE))
    rules = PromptRules(vocab_size=999, max_model_len=64, max_positions=64, tokenizer=chatty)

    def ids_of(messages: list[dict[str, str]]) -> tuple[int, ...]:
        return rules.encode(rules.chat_text(messages), add_special_tokens=False)

    for text, reason in {
        "endless": r"does not end within 2 s",
        "large": r"takes more than 512 MiB",
        "long": r"makes 40000004 characters",
    }.items():
        assert ids_of([{"role": "user", "content": "hi"}]) == tuple(byte_ids(b"hi"))
        with pytest.raises(BadRow, match=reason) as caught:
            ids_of([{"role": "user", "content": text}])
        assert caught.value.code == "invalid_prompt"
    assert ids_of([{"role": "user", "content": "é\n"}]) == tuple(byte_ids("é\n".encode()))


def test_the_process_of_a_chat_template_ends_with_its_tokenizer(tmp_path: Path) -> None:
    chatty = Tokenizer.load(make_tokenizer_files(tmp_path, chat_template=TEMPLATE))
    chatty.chat([{"role": "user", "content": "hi"}])
    process = chatty._chats[TEMPLATE]._template._process
    assert process is not None and process.poll() is None
    del chatty
    gc.collect()
    assert process.poll() is not None


def test_a_template_gets_the_date_of_the_run(tmp_path: Path) -> None:
    template = "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }} at "
    template += "{{ strftime_now('%H:%M:%S') }} {{ messages[0]['content'] }}"
    folder = make_tokenizer_files(tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "hi"}]
    started = datetime(2001, 2, 3, 4, 5, 6)
    chatty = Tokenizer.load(folder, started=started)
    assert chatty.chat(messages) == tuple(byte_ids(b"03 Feb 2001 at 04:05:06 hi"))
    process = chatty._chats[template]._template._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(UsageError, match="its process ended"):
        chatty.chat(messages)
    assert chatty.chat(messages) == tuple(byte_ids(b"03 Feb 2001 at 04:05:06 hi"))


def test_chat_without_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no chat template") as raised:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert "prompts" in raised.value.hint


def test_nothing_on_stderr_and_verbosity_is_put_back(directory: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from dakrun.requests import Tokenizer
assert "transformers" not in sys.modules
t = Tokenizer.load(Path({str(directory)!r}))
assert len(t.encode("x" * 5000)) == 5001
from transformers.utils import logging
assert logging.get_verbosity() == logging.WARNING
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("lo w",), "hello world"),
        (("he",), "the end"),
        (("é🎉",), "aé🎉b"),
        (("\n\n",), "a\nb\n\nc"),
        (("never", "or"), "a word"),
        (("abcdefghijklmnopqrstuvwxyz" * 3,), "x" * 50 + "abcdefghijklmnopqrstuvwxyz" * 4),
    ],
)
def test_stop_is_hit_by_the_token_that_completes_it(
    tokenizer: Tokenizer, stop: tuple[str, ...], text: str
) -> None:
    finder = StopStrings(stop, tokenizer.decode)
    ids = list(tokenizer.encode(text))[1:]
    first = next(n for n in range(1, len(ids) + 1) if finder.hit(ids[:n]))
    expected = next(
        n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stop)
    )
    assert first == expected
    cut = finder.cut(tokenizer.decode(ids[:first]))
    assert cut == text[: min(text.index(s) for s in stop if s in text)]


def test_stop_is_found_inside_a_token_and_across_the_bytes_of_a_character() -> None:
    words = {0: "one", 1: " sto", 2: "p it", 3: ".END.more"}
    finder = StopStrings(("stop", "END"), lambda ids: "".join(words[i] for i in ids))
    assert [finder.hit(ids) for ids in ([0], [0, 1], [0, 1, 2], [0, 3])] == [
        False,
        False,
        True,
        True,
    ]
    assert finder.cut("one.END.stop") == "one."
    by_byte = StopStrings(("🎉",), lambda ids: bytes(ids).decode(errors="replace"))
    data = list("ab🎉".encode())
    assert [by_byte.hit(data[:n]) for n in range(1, 7)] == [False] * 5 + [True]


def test_stop_looks_at_the_last_tokens_only() -> None:
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return "x" * len(ids)

    StopStrings(("abc", "é"), decode).hit(list(range(10_000)))
    assert seen == [2] * 7 + [3 + 4]


def test_stop_is_found_across_tokens_without_text(tokenizer: Tokenizer) -> None:
    finder = StopStrings(("ab",), tokenizer.decode)
    ids = [*byte_ids(b"a"), *[1, 2] * 20, *byte_ids(b"b")]
    assert [finder.hit(ids[:-1]), finder.hit(ids)] == [False, True]


@pytest.fixture(scope="module")
def falls_back() -> tokenizers.Tokenizer:
    """As Llama 2's: bytes that no token stands for are tokens; all of a run are valid, or none."""
    words = ["<s>", "\u2581", "\u2581b", "a", "b", "ab", "\u2581a b"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<s>"])
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return made


@pytest.mark.parametrize("stop", [("é",), ("a b",), ("b", "€"), ("éa",), (" ",), ("\ufffd",)])
def test_a_hit_agrees_with_all_of_the_text(
    falls_back: tokenizers.Tokenizer, stop: tuple[str, ...]
) -> None:
    chance = random.Random(20261130)
    parts = [[i] for i in range(7)] + [[7 + b for b in c.encode()] for c in "aéé€🎉"] + [[262]]
    for _ in range(300):
        ids = [t for part in chance.choices(parts, k=chance.randint(1, 30)) for t in part]
        finder, counts = StopStrings(stop, falls_back.decode), range(1, len(ids) + 1)
        expected = (any(s in falls_back.decode(ids[:n]) for s in stop) for n in counts)
        for n, is_in in zip(counts, expected, strict=True):
            assert finder.hit(ids[:n]) == is_in
            if is_in:
                break


def test_without_stop_strings_nothing_is_decoded_or_cut() -> None:
    finder = StopStrings((), lambda ids: pytest.fail("decoded"))
    assert not finder.hit([1, 2, 3]) and finder.cut("all of it") == "all of it"
    assert StopStrings(("zz",), lambda ids: "").cut("all of it") == "all of it"


PARTS = (
    "{% for m in messages %}{{ m['role'][0] }}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %};{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{{ m['role'][0] }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}<parts>{% endif %};{% endfor %}"
)
TEXT_PARTS = [{"type": "text", "text": "hi"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PARTS, TEXT_PARTS, "uhib;"),
        (PARTS, "hi", "uhi;"),
        (EITHER, TEXT_PARTS, "uhi\nb;"),
        (EITHER, "hi", "uhi;"),
        ("{{ messages[0]['content'] | upper }}", TEXT_PARTS, "HI\nB"),
        ("{{ messages[0]['content'] + '!' }}", TEXT_PARTS, "hi\nb!"),
    ],
)
def test_content_has_the_form_that_the_template_uses(
    template: str, content: object, text: str
) -> None:
    chatty = chat_tokenizer(template)
    assert chatty.decode(chatty.chat([{"role": "user", "content": content}])) == text


def test_the_form_of_content_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each sequence of roles: a chat is otherwise rendered once."""
    chatty = Tokenizer.load(make_tokenizer_files(tmp_path, chat_template=PARTS))
    rendered = []
    render = chat_template.ChatTemplate.render

    def count(
        self: chat_template.ChatTemplate,
        messages: list[dict[str, object]],
        options: chat_template.TemplateOptions = chat_template.PLAIN,
    ) -> str:
        rendered.append(messages)
        return render(self, messages, options)

    monkeypatch.setattr(chat_template.ChatTemplate, "render", count)
    for text in ("a", "b", "c"):
        chatty.chat([{"role": "user", "content": text}])
    assert len(rendered) == 3 + 2 + 1


USER_ONLY = "{% for m in messages if m['role'] == 'user' %}<u>{{ m['content'][:12] }}{% endfor %}"
THOUGHTS = "{% for m in messages %}{{ m['content'].split('</think>')[-1] | trim }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "chat", "lost"),
    [
        (USER_ONLY, [("system", "u"), ("user", "hi")], 1),
        (USER_ONLY, [("user", "hi"), ("developer", "Be brief"), ("user", "b")], 2),
        (USER_ONLY, [("user", "hi"), ("assistant", "a thought"), ("user", "bb")], None),
        (USER_ONLY, [("user", "one long line of text")], None),
        ("{{ messages[-1]['content'] | upper }}", [("user", "hi")], None),
        ("{{ messages[-1]['content'] | upper }}", [("user", "h"), ("user", "hi")], 1),
        ("{% if messages[0]['content'] %}x{% endif %}", [("user", "x")], 1),
        (THOUGHTS, [("user", "hi</think>")], 1),
        (THOUGHTS, [("user", "hi</think> b"), ("assistant", "a</think>")], None),
        (THOUGHTS, [("user", "  "), ("user", "b")], None),
        ("{{ messages | map(attribute='content') | join | e }}", [("user", "<&>")], None),
    ],
)
def test_a_message_that_a_template_loses_is_an_error(
    template: str, chat: list[tuple[str, str]], lost: int | None
) -> None:
    """Unless it is an assistant's; parts of messages may be lost."""
    chatty = chat_tokenizer(template)
    messages = [{"role": role, "content": text} for role, text in chat]
    if lost is None:
        assert chatty.chat(messages)
        return
    with pytest.raises(UsageError, match=f"nothing of message {lost}, whose role is"):
        chatty.chat(messages)
