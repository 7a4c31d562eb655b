"""What changes nothing is accepted, in rows and messages; what would change something is named."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.errors import CannotRun
from dakrun.models.hf_config import parse_model_config, read_model_config
from dakrun.requests import BadRow, PromptRules
from dakrun.requests.messages import _message
from dakrun.requests.native_rows import parse_native
from dakrun.requests.openai_rows import parse_batch

RULES = PromptRules(vocab_size=10, max_model_len=100, max_positions=100)
NEUTRAL = {
    "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0,
    "min_tokens": 0, "tool_choice": "auto", "tools": [], "parallel_tool_calls": True,
    "modalities": ["text"], "skip_special_tokens": True, "include_stop_str_in_output": False,
    "service_tier": "default",
}  # fmt: skip
CHANGING = {
    "best_of": 2, "tool_choice": "required",
    "tools": [{}], "modalities": ["audio"], "skip_special_tokens": False, "stream": 0,
    "include_stop_str_in_output": True,
}  # fmt: skip


def batch(body: dict[str, Any], url: str = "/v1/completions") -> SamplingParams:
    row = {"custom_id": "a", "method": "POST", "url": url, "body": {"prompt": [1], **body}}
    return parse_batch(row, SamplingParams(), RULES)[0].params


def native(fields: dict[str, Any]) -> SamplingParams:
    return parse_native({"prompt_token_ids": [1], **fields}, SamplingParams(), RULES)[0].params


@pytest.mark.parametrize("parse", [batch, native])
def test_neutral_values_change_nothing(parse: Any) -> None:
    assert parse(NEUTRAL) == parse({})
    for name, value in CHANGING.items():
        with pytest.raises(BadRow, match=name):
            parse({name: value})


@pytest.mark.parametrize("parse", [batch, native])
def test_whole_floats_are_integers_and_top_k_of_minus_one_keeps_all(parse: Any) -> None:
    found = parse({"max_tokens": 64.0, "seed": 3.0, "top_k": -1, "thinking_token_budget": 9.0})
    assert (found.max_tokens, type(found.max_tokens), found.seed) == (64, int, 3)
    assert found.thinking_token_budget == 9
    assert found.top_k == 0 and parse({"top_k": 0}).top_k == 0
    with pytest.raises(Exception, match="max_tokens"):
        parse({"max_tokens": 64.5})


def test_urls_of_azure_and_ignored_fields() -> None:
    ignored = {"safety_identifier": "x", "prompt_cache_key": "y", "user": "z"}
    assert batch(ignored, "/completions") == batch({})
    with pytest.raises(BadRow, match="url"):
        batch({}, "/embeddings")


def test_empty_lists_of_messages() -> None:
    empty = {"tool_calls": [], "annotations": [], "audio": None, "refusal": None}
    message = {"role": "assistant", "content": "plus"}
    assert _message(1, {**message, **empty}) == message
    with pytest.raises(BadRow, match="tool call 1 of message 1 has no function"):
        _message(1, {**message, "tool_calls": [{}]})


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    base = ["generate", "--model", str(MODEL), "-o", "-", "--device", "cpu", "--max-tokens", "2"]
    return CliRunner().invoke(main, [*base, *arguments], input=stdin)


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.txt.gz", "-"])
def test_utf16_is_one_error(tmp_path: Path, encoding: str, name: str) -> None:
    data = '{"prompt": "two plus three ="}\r\n{"prompt": "x"}\r\n'.encode(encoding)
    path = tmp_path / name
    if name != "-":
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    result = run("-i", "-" if name == "-" else str(path), stdin=data)
    assert result.exit_code == 2 and result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert "UTF-16" in error
    (command,) = re.findall("iconv -f [^ ]+ -t UTF-8", hint)  # which makes the right text
    made = subprocess.run(command.split(), input=data, capture_output=True, check=True).stdout
    assert made.decode() == data.decode(encoding)


CONFIG = json.loads((MODEL / "config.json").read_text())


@pytest.mark.parametrize(
    "name", ["LlamaForSequenceClassification", "LlamaModel", "LlamaForTokenClassification"]
)
def test_models_without_a_language_model_head_are_refused(tmp_path: Path, name: str) -> None:
    config = {**CONFIG, "architectures": [name], "tie_word_embeddings": True}
    with pytest.raises(CannotRun, match=f"{name} is not supported"):
        parse_model_config(config, name="m")
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(main, ["plan", "--model", str(tmp_path), "--profile", "h100-sxm"])
    assert result.exit_code == 3 and name in result.stderr


def test_an_adapter_is_never_ignored(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for _ in range(2):  # alone, then beside a base model
        with pytest.raises(CannotRun, match="LoRA adapter"):
            read_model_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))


def test_json_may_begin_with_a_byte_order_mark_and_a_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(CONFIG).encode())
    assert read_model_config(tmp_path).num_layers == CONFIG["num_hidden_layers"]
    bare = {name: value for name, value in CONFIG.items() if name not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CannotRun, match="git-lfs pointer"):
        read_model_config(tmp_path)
