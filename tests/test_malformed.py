"""Malformed checkpoints, profiles, rows and flags: an error and a hint, or an error row; no crash.

One table of them all. Nothing may be written, and no code that a model brings may run.
"""

import gzip
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dakrun.cli import main
from dakrun.demo import MODEL
from dakrun.hardware import load_profile, profile_text

Spoil = Callable[[Path], object]
USAGE, CANNOT_RUN = 2, 3


@dataclass(frozen=True)
class Call:
    """A command that is refused with `code`; `said` is in its error line, `hint` in its hint."""

    code: int
    said: str
    hint: str = ""
    spoil: Spoil = lambda folder: None
    flags: tuple[str, ...] = ()
    command: str = "generate"


@dataclass(frozen=True)
class Row:
    """A line of a prompt file that becomes an error row with `code`; `said` is in its message."""

    line: str | bytes
    code: str
    said: str


class Trap:
    """Writes a file as soon as it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("trap"),))


def edit(name: str, **changes: object) -> Spoil:
    """Change fields of a JSON file in the model's folder; "absent" removes one."""

    def spoil(folder: Path) -> None:
        path = folder / "model" / name
        fields = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in fields.items() if v != "absent"}))

    return spoil


def config(said: str, hint: str = "", code: int = USAGE, **changes: object) -> Call:
    return Call(code, said, hint, edit("config.json", **changes))


def put(name: str, content: str | bytes) -> Spoil:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def tensors(**changes: torch.Tensor | None) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "model" / "model.safetensors"
        changed = load_file(path) | changes
        save_file({k: v.clone() for k, v in changed.items() if v is not None}, path)

    return spoil


def truncate(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickled(name: str) -> Spoil:
    """A pickle in place of the weights."""

    def spoil(folder: Path) -> None:
        (folder / "model" / "model.safetensors").unlink()
        (folder / "model" / name).write_bytes(pickle.dumps(Trap()))

    return spoil


def pickled_shard(folder: Path) -> None:
    pickled("pytorch_model.bin")(folder)
    put(INDEX, '{"weight_map": {"lm_head.weight": "pytorch_model.bin"}}')(folder)


def sharded(index: str) -> Spoil:
    """The weights under another name, beside an index."""

    def spoil(folder: Path) -> None:
        (folder / "model" / "model.safetensors").rename(folder / "model" / "part.safetensors")
        put(INDEX, index)(folder)

    return spoil


def repeated(folder: Path) -> None:
    for name in ("part-1.safetensors", "part-2.safetensors"):
        shutil.copy(folder / "model" / "model.safetensors", folder / "model" / name)
    (folder / "model" / "model.safetensors").unlink()


def tokenizer_with_code(folder: Path) -> None:
    auto_map = {"AutoTokenizer": [None, "code.MyTokenizer"]}
    edit("tokenizer_config.json", tokenizer_class="MyTokenizer", auto_map=auto_map)(folder)
    code = "import pathlib\npathlib.Path('trap').touch()\nclass MyTokenizer: pass\n"
    (folder / "model" / "code.py").write_text(code)


def profile(old: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        text = profile_text(load_profile("cpu"))
        assert old in text
        (folder / "mine.toml").write_text(text.replace(old, new, 1))

    return spoil


def profile_call(said: str, spoil: Spoil, command: str = "plan") -> Call:
    return Call(USAGE, said, "profiles/", spoil, ("--profile", "mine.toml"), command)


def flags(code: int, said: str, *words: str, hint: str = "", command: str = "generate") -> Call:
    return Call(code, said, hint, flags=words, command=command)


def batch(body: object, url: str = "/v1/completions", **changes: object) -> str:
    row = {"custom_id": "bad", "method": "POST", "url": url, "body": body, **changes}
    return json.dumps({k: v for k, v in row.items() if v != "absent"})


CHAT = "/v1/chat/completions"
INDEX = "model/model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"
NO_LLAMA3 = {"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 1, "high_freq_factor": 4}

CHECKPOINTS = {
    "no model folder": Call(
        USAGE, "no such model directory", "hub id", lambda f: shutil.rmtree(f / "model")
    ),
    "empty model folder": Call(
        USAGE, "config.json: no such file", "model directory", flags=("--model", "folder")
    ),
    "model is a file": flags(USAGE, "not a model directory", "--model", "mine.toml"),
    "model is a path": flags(USAGE, "no such model directory", "--model", "no/where/at/all"),
    "model is a missing folder": flags(USAGE, "./nowhere", "--model", "./nowhere"),
    "model has no weights": flags(USAGE, "names an architecture", "--model", "opt-125m"),
    "no weights": Call(
        CANNOT_RUN, "no safetensors files", "copy", remove("model/model.safetensors")
    ),
    "only .bin": Call(
        CANNOT_RUN, "can contain code", "dakrun convert", pickled("pytorch_model.bin")
    ),
    "pickle called safetensors": Call(
        CANNOT_RUN, "not a complete safetensors", "copy", pickled("model.safetensors")
    ),
    "index of a pickle": Call(CANNOT_RUN, "not a complete safetensors", "copy", pickled_shard),
    "truncated": Call(CANNOT_RUN, "not a complete safetensors", "copy the file", truncate),
    "empty safetensors": Call(
        CANNOT_RUN, "not a complete safetensors", "copy", put("model/model.safetensors", b"")
    ),
    "page instead of weights": Call(
        CANNOT_RUN, "not a complete", "copy", put("model/model.safetensors", "<html>404</html>" * 9)
    ),
    "endless safetensors header": Call(
        CANNOT_RUN, "not a complete", "copy", put("model/model.safetensors", b"\xff" * 64)
    ),
    "missing shard": Call(
        CANNOT_RUN, "gone.safetensors: no such file", "shard",
        sharded('{"weight_map": {"a": "part.safetensors", "b": "gone.safetensors"}}'),
    ),
    "empty index": Call(USAGE, "has no weight_map", "copy the index", sharded("{}")),
    "index of a list": Call(USAGE, "has no weight_map", "", sharded('{"weight_map": ["a"]}')),
    "index is no JSON": Call(USAGE, "cannot be read", "copy", sharded("{")),
    "index of numbers": Call(
        USAGE, "names 5", "copy the index", sharded('{"weight_map": {"a": 5}}')
    ),
    "index of lists": Call(
        USAGE, "['a']", "", sharded('{"weight_map": {"a": ["a"]}}')
    ),
    "index of another folder": Call(
        USAGE, "'../part.safetensors'", "copy the index",
        sharded('{"weight_map": {"a": "../part.safetensors"}}'),
    ),
    "index of any file": Call(
        USAGE, "names '/etc/passwd'", "", sharded('{"weight_map": {"a": "/etc/passwd"}}')
    ),
    "tensor in two files": Call(
        CANNOT_RUN, "part-2.safetensors: tensor model.embed_tokens.weight is also in part-1.",
        "one checkpoint", repeated,
    ),
    "missing tensor": Call(
        CANNOT_RUN, f"tensor {NORM} is missing", "file", tensors(**{NORM: None})
    ),
    "fewer layers than the weights": config(
        "config.json does not account for tensor model.layers.2.input_layernorm.weight",
        "belong together", CANNOT_RUN, num_hidden_layers=2,
    ),
    "bias that config denies": Call(
        CANNOT_RUN, f"does not account for tensor {BIAS}", "belong together",
        tensors(**{BIAS: torch.zeros(256)}),
    ),
    "misshapen tensor": Call(
        CANNOT_RUN, f"tensor {DOWN} is 256x127, config.json says 256x128", "belong together",
        tensors(**{DOWN: torch.zeros(256, 127)}),
    ),
    "matrix of int8": Call(
        CANNOT_RUN, f"tensor {DOWN} is stored as I8", "checkpoint that it was made from",
        tensors(**{DOWN: torch.zeros(256, 128, dtype=torch.int8)}),
    ),
    "norm of int64": Call(
        CANNOT_RUN, f"tensor {NORM} is stored as I64", "float16",
        tensors(**{NORM: torch.ones(64, dtype=torch.int64)}),
    ),
    "packed int4": Call(
        CANNOT_RUN, f"tensor {DOWN} is stored as U8", "float16",
        tensors(**{DOWN: torch.zeros(256, 64, dtype=torch.uint8)}),
    ),
    "matrix of float8": Call(
        CANNOT_RUN, f"tensor {DOWN} is stored as F8_E4M3", "float16",
        tensors(**{DOWN: torch.zeros(256, 128, dtype=torch.float8_e4m3fn)}),
    ),
    "scalar for a matrix": Call(
        CANNOT_RUN, f"tensor {DOWN} is ", "belong together", tensors(**{DOWN: torch.tensor(1.0)})
    ),
}  # fmt: skip

CONFIGS = {
    "no config": Call(USAGE, "no such file", "model directory", remove("model/config.json")),
    "config is no JSON": Call(USAGE, "cannot be read", "copy it", put("model/config.json", "{")),
    "config is too deep": Call(
        USAGE, "cannot be read", "copy it", put("model/config.json", "[" * 100_000)
    ),
    "config is a list": Call(USAGE, "not a JSON object", "", put("model/config.json", "[]")),
    "config is no text": Call(USAGE, "cannot be read", "", put("model/config.json", b"\xff\x00")),
    "config says nothing": Call(
        CANNOT_RUN, "architecture (none named)", "Llama", put("model/config.json", "{}")
    ),
    "generation config is no JSON": Call(
        USAGE, "generation_config.json: cannot be read", "", put("model/generation_config.json", "")
    ),
    "other architecture": config(
        "MambaForCausalLM", "LlamaForCausalLM", CANNOT_RUN,
        model_type="mamba", architectures=["MambaForCausalLM"],
    ),
    "quantized": config(
        "hqq", "AWQ, GPTQ", CANNOT_RUN, quantization_config={"quant_method": "hqq"}
    ),
    "no vocabulary": config("has no 'vocab_size'", vocab_size="absent"),
    "negative vocabulary": config("vocab_size is -64", vocab_size=-64),
    "no width": config("hidden_size is 0", hidden_size=0),
    "width in words": config('hidden_size is "wide"', hidden_size="wide"),
    "layers are a boolean": config("num_hidden_layers is true", num_hidden_layers=True),
    "layers are a fraction": config("num_hidden_layers is 2.5", num_hidden_layers=2.5),
    "no positions": config("max_position_embeddings is null", max_position_embeddings=None),
    "odd heads": config("cannot share", num_key_value_heads=3),
    "odd head size": config("an even head_dim, not 33", head_dim=33),
    "no heads": config("num_attention_heads is 0", num_attention_heads=0),
    "tied is a word": config('tie_word_embeddings is "yes"', tie_word_embeddings="yes"),
    "end token is a word": Call(
        USAGE, "generation_config.json: eos_token_id is 'end'", "published",
        edit("generation_config.json", eos_token_id="end"),
    ),
    "other type": config("dtype 'int8'", "float16", CANNOT_RUN, dtype="int8"),
    "other activation": config("activation 'gelu'", "silu", CANNOT_RUN, hidden_act="gelu"),
    "other rope": config(
        "rope type 'ntk'", "llama3", CANNOT_RUN, rope_parameters={"rope_type": "ntk"}
    ),
    "rope without factors": config("no 'factor'", rope_parameters={"rope_type": "llama3"}),
    "rope that makes no sense": config("rope scaling", rope_parameters=NO_LLAMA3),
    "rope is a list": config("rope_parameters is [1], not an object", rope_parameters=[1]),
}  # fmt: skip

TOKENIZERS = {
    "no tokenizer": Call(
        CANNOT_RUN, "no tokenizer files", "tokenizer.json", remove("model/tokenizer.json")
    ),
    "tokenizer is no JSON": Call(
        CANNOT_RUN, "tokenizer cannot be loaded", "again", put("model/tokenizer.json", "{")
    ),
    "tokenizer says nothing": Call(
        CANNOT_RUN, "tokenizer cannot be loaded", "again", put("model/tokenizer.json", "{}")
    ),
    "tokenizer is no text": Call(
        CANNOT_RUN, "tokenizer cannot be loaded", "again", put("model/tokenizer.json", b"\xff\xfe")
    ),
    "tokenizer config is no JSON": Call(
        CANNOT_RUN, "tokenizer cannot be loaded", "", put("model/tokenizer_config.json", "{")
    ),
    "tokenizer with code": Call(CANNOT_RUN, "cannot be loaded", "", tokenizer_with_code),
}

PROFILES = {
    "profile is no TOML": profile_call("not TOML", put("mine.toml", "[[[")),
    "profile says nothing": profile_call("schema is None", put("mine.toml", "")),
    "profile of another schema": profile_call("schema is 99", put("mine.toml", "schema = 99")),
    "profile without table": profile_call("'device' is missing", profile("[device]", "[gadget]")),
    "profile with a word": profile_call("sms is 'many'", profile("sms = ", 'sms = "many" # ')),
    "profile without rate": profile_call(
        "hbm.speed is unknown", profile("\nbytes_per_s", "\nspeed")
    ),
    "profile with other types": profile_call(
        "compute.int4 is unknown", profile("[compute.float32]", "[compute.int4]"), "generate"
    ),
    "profile is no text": Call(
        USAGE, "mine.toml", "", put("mine.toml", b"\xff"), ("--profile", "mine.toml"), "plan"
    ),
    "unknown profile": flags(USAGE, "no profile 'abacus'", "--profile", "abacus", hint="cpu"),
}

FLAGS = {
    "missing input": flags(USAGE, "none.txt: cannot be read", "-i", "none.txt"),
    "input is a folder": flags(USAGE, "Is a directory", "-i", "folder"),
    "input of another kind": flags(USAGE, "end in .txt or .jsonl", "-i", "mine.toml"),
    "output is input": flags(USAGE, "the prompts come from", "-o", "prompts.jsonl"),
    "output folder missing": flags(USAGE, "no: no such directory", "-o", "no/out.jsonl"),
    "output is a folder": flags(USAGE, "is a directory", "-o", "folder", hint=".jsonl"),
    "output exists": Call(
        USAGE, "not empty", "--resume", put("out.jsonl", "notes"), ("-o", "out.jsonl")
    ),
    "output is another kind": flags(
        USAGE, "out.csv: result files end in .jsonl", "-o", "out.csv", hint="-o out.jsonl"
    ),
    "resume of something else": Call(
        USAGE, "line 1 is not a result row", "--overwrite", put("out.jsonl", "notes"),
        ("-o", "out.jsonl", "--resume"),
    ),
    "gzip input is cut off": Call(
        CANNOT_RUN, "prompts.jsonl: a damaged gzip file", "--resume",
        put("prompts.jsonl", gzip.compress(b'{"prompt_token_ids": [1]}')[:-9]),
    ),
    "gzip output is damaged": Call(
        USAGE, "out.jsonl.gz: damaged as a gzip file", "zcat",
        put("out.jsonl.gz", gzip.compress(b"notes")[:10] + b"\xff" * 9),
        ("-o", "out.jsonl.gz", "--resume"),
    ),
    "resume of standard output": flags(USAGE, "cannot be resumed", "-o", "-", "--resume"),
    "resume and overwrite": flags(USAGE, "exclude", "--resume", "--overwrite"),
    "report folder missing": flags(USAGE, "no such folder", "--report", "no/report.json"),
    "size in words": flags(USAGE, "'lots' is not a size", "--hbm-budget", "lots"),
    "negative size": flags(USAGE, "is not a size", "--host-budget", "-1GiB"),
    "ratio above 1": flags(USAGE, "1.5", "--offload-ratio", "1.5"),
    "ratio is no number": flags(USAGE, "nan", "--kv-offload-ratio", "nan"),
    "no batch": flags(USAGE, "'0' is not auto", "--batch-size", "0"),
    "no tokens": flags(USAGE, "--max-tokens", "--max-tokens", "0"),
    "negative temperature": flags(USAGE, "temperature is -1.0", "--temperature", "-1"),
    "hot beyond sense": flags(USAGE, "temperature is nan", "--temperature", "nan"),
    "top-p of 0": flags(USAGE, "top_p is 0", "--top-p", "0", hint="above 0"),
    "negative top-k": flags(USAGE, "top_k is -2", "--top-k", "-2"),
    "negative seed": flags(USAGE, "seed is -1", "--seed", "-1"),
    "empty stop": flags(USAGE, "stop is", "--stop", "", hint="non-empty"),
    "too long": flags(USAGE, "beyond the", "--max-model-len", "100000"),
    "too small": flags(
        CANNOT_RUN, "too small",
        "--hbm-budget", "16MiB", "--host-budget", "1KiB", "--batch-size", "64",
    ),
    "more threads than can start": flags(
        USAGE, "threads is 100,000, above the maximum", "--threads", "100000", hint="all cores"
    ),
    "NUL in the prompts' name": flags(USAGE, "NUL", "-i", "a\0.jsonl", hint="take it out"),
    "NUL in the output's name": flags(USAGE, "NUL", "-o", "a\0.jsonl", hint="take it out"),
    "NUL in the model's name": flags(USAGE, "NUL", "--model", "a\0", hint="take it out"),
    "NUL in the profile's name": flags(USAGE, "NUL", "--profile", "a\0.toml", hint="take it out"),
    "NUL in the report's name": flags(USAGE, "NUL", "--report", "a\0.json", hint="take it out"),
    "NUL in the plan's model": flags(USAGE, "NUL", "--model", "a\0", command="plan"),
    "NUL in the plan's profile": flags(USAGE, "NUL", "--profile", "a\0.toml", command="plan"),
    "other type wanted": flags(USAGE, "--dtype", "--dtype", "int4"),
    "other device": flags(USAGE, "--device", "--device", "tpu"),
    "unknown remote": flags(USAGE, "moon", "--remote", "moon"),
    "plan without tokens": flags(USAGE, "--max-tokens", "--max-tokens", "0", command="plan"),
    "plan of another type": flags(USAGE, "--dtype", "--dtype", "int4", command="plan"),
    "plan of a size in words": flags(USAGE, "size", "--host-budget", "all", command="plan"),
    "plan of a million layers": Call(
        USAGE, "num_layers is 1,000,000, above the maximum of 1,000",
        spoil=edit("config.json", num_hidden_layers=10**6),
        flags=("--model", "model"), command="plan",
    ),
    "a size beyond sense": Call(
        USAGE, "hidden_size is 1,000,000,000,000, above the maximum",
        spoil=edit("config.json", hidden_size=10**12),
    ),
    "plan of a folder without model": flags(
        USAGE, "config.json: no such file", "--model", "folder", command="plan"
    ),
    "plan of a file that is no config": flags(
        USAGE, "cannot be read", "--model", "mine.toml", command="plan"
    ),
    "plan in no profile": flags(USAGE, "no profile 'no.toml'", "--profile", "no.toml",
                                command="plan"),
}  # fmt: skip

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]

ROWS = {
    "row is cut off": Row('{"id": "bad", "prompt": "one', "invalid_json", "not JSON"),
    "row is text": Row("one plus one equals", "invalid_json", "not JSON"),
    "row is a list": Row('["one"]', "invalid_json", "an array, not an object"),
    "row is no UTF-8": Row(b'{"prompt": "\xff"}', "invalid_utf8", "byte 0xff"),
    "row is binary": Row(b"\x01\x02\x80", "invalid_utf8", "byte 0x80"),
    "row is too deep": Row("[" * 100_000, "invalid_json", "too deep"),
    "row has a huge number": Row('{"seed": ' + "9" * 5000 + "}", "invalid_json", "too long"),
    "row has a field twice": Row(
        '{"id": "bad", "prompt": "one", "max_tokens": 2, "prompt": "two"}',
        "invalid_json",
        "the key 'prompt' occurs twice in an object",
    ),
    "row without prompt": Row('{"id": "bad"}', "invalid_prompt", "exactly one of"),
    "row with two prompts": Row(
        '{"prompt": "one", "prompt_token_ids": [1]}', "invalid_prompt", "exactly one of"
    ),
    "id is a list": Row('{"id": [], "prompt": "one"}', "invalid_field", "id is not a string"),
    "id is taken": Row('{"id": "good", "prompt": "one"}', "duplicate_id", "id 'good'"),
    "prompt is a number": Row('{"prompt": 1}', "invalid_prompt", "a number, not a string"),
    "prompt has half a character": Row(
        '{"prompt": "\\ud83d"}', "invalid_prompt", "half a surrogate pair"
    ),
    "prompt is too long": Row(
        json.dumps({"prompt": "one " * 200}), "prompt_too_long", "the prompt has 201 tokens"
    ),
    "no token ids": Row('{"prompt_token_ids": []}', "invalid_prompt", "no tokens"),
    "token beyond the model": Row('{"prompt_token_ids": [64]}', "invalid_prompt", "of 64"),
    "token is a fraction": Row('{"prompt_token_ids": [1.5]}', "invalid_prompt", "integers"),
    "unknown field": Row('{"prompt": "one", "suffix": "x"}', "unsupported_field", "'suffix'"),
    "tools of no chat": Row('{"prompt": "one", "tools": [1]}', "invalid_field", "need messages"),
    "temperature is a word": Row(
        '{"prompt": "one", "temperature": "hot"}', "invalid_field", "temperature is 'hot'"
    ),
    "a penalty beyond sense": Row(
        '{"prompt": "one", "repetition_penalty": 1e-300}', "invalid_field", "from 1e-06 to 1e+06"
    ),
    "stop is empty": Row('{"prompt": "one", "stop": [""]}', "invalid_field", "non-empty"),
    "Batch row among native rows": Row(batch({"prompt": "one"}), "mixed_formats", "OpenAI Batch"),
}
BATCH_ROWS = {
    "native row among Batch rows": Row('{"id": 1, "prompt": "a"}', "mixed_formats", "is native"),
    "Batch row is cut off": Row('{"custom_id": "bad", "body": {', "invalid_json", "not JSON"),
    "a field of the body is there twice": Row(
        batch({"prompt": "one"}).replace('"prompt"', '"prompt": "two", "prompt"'),
        "invalid_json",
        "the key 'prompt' occurs twice",
    ),
    "no custom_id": Row(batch({}, custom_id="absent"), "invalid_field", "custom_id is missing"),
    "custom_id is taken": Row(
        batch({"prompt": "one"}, custom_id="good"), "duplicate_id", "id 'good'"
    ),
    "other method": Row(batch({}, method="GET"), "invalid_field", "method is 'GET'"),
    "other url": Row(batch({}, "/v1/embeddings"), "unsupported_url", "'/v1/embeddings'"),
    "no body": Row(batch("absent"), "invalid_field", "body is null"),
    "a bad prompt of several": Row(
        batch({"prompt": ["one", {}]}), "invalid_prompt", "prompt 2 of the array: prompt is an obj"
    ),
    "too many choices": Row(batch({"prompt": "one", "n": 9}), "invalid_field", "n is 9"),
    "stream": Row(batch({"prompt": "one", "stream": True}), "unsupported_field", "'stream'"),
    "log probabilities": Row(
        batch({"prompt": "one", "logprobs": 6}), "invalid_field", "logprobs is 6"
    ),
    "no chat template": Row(
        batch({"messages": [{"role": "user", "content": "a"}]}, CHAT), "no_chat_template", "as text"
    ),
    "no messages": Row(batch({"messages": []}, CHAT), "invalid_prompt", "at least one message"),
    "image": Row(batch({"messages": IMAGE}, CHAT), "unsupported_field", "message 1 has a part"),
    "Batch limit is a word": Row(
        batch({"prompt": "one", "max_tokens": "all"}), "invalid_field", "max_tokens is 'all'"
    ),
}

CALLS = CHECKPOINTS | CONFIGS | TOKENIZERS | PROFILES | FLAGS
CASES: dict[str, Call | Row] = {**CALLS, **ROWS, **BATCH_ROWS}
GOOD, GOOD_BATCH = '{"id": "good", "prompt": "one"}', batch({"prompt": "one"}, custom_id="good")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model, prompts, and a file that is neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine.toml").write_text("precious")
    (tmp_path / "prompts.jsonl").write_text(GOOD)
    return tmp_path


def generate(folder: Path, *flags: str) -> list[str]:
    run = ["generate", "--model", "./model", "-i", "prompts.jsonl", "-o", "out.jsonl"]
    return [*run, "--device", "cpu", "--batch-size", "2", "--max-tokens", "2", *flags]


@pytest.mark.parametrize("case", CASES)
def test_malformed(case: str, folder: Path) -> None:
    given = CASES[case]
    if isinstance(given, Call):
        refused(given, folder)
    else:
        becomes_an_error_row(given, folder, is_batch=case in BATCH_ROWS)
    assert not (folder / "trap").exists(), "code that came with the model ran"


def refused(call: Call, folder: Path) -> None:
    call.spoil(folder)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    arguments = generate(folder, *call.flags)
    if call.command == "plan":
        arguments = ["plan", "--model", "opt-30b", "--profile", "gh200", *call.flags]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == call.code, result.output
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ") and call.said in error, error
    assert hint.startswith("hint: ") and call.hint in hint, hint
    assert "internal:" not in error and result.stdout == ""
    after = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    assert after == before, "nothing is written, nothing lost"


def becomes_an_error_row(row: Row, folder: Path, *, is_batch: bool) -> None:
    good = GOOD_BATCH if is_batch else GOOD
    line = row.line if isinstance(row.line, bytes) else row.line.encode()
    (folder / "prompts.jsonl").write_bytes(good.encode() + b"\n" + line + b"\n")
    result = CliRunner().invoke(main, generate(folder))
    assert result.exit_code == 1, result.output
    assert "1 row done, 1 failed, 0 skipped" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    (error,) = [found["error"] for found in rows if found.get("error")]
    assert (error["code"], error["line"]) == (row.code, 2)
    assert row.said in error["message"] and "\n" not in error["message"]
    assert {found["custom_id" if is_batch else "id"] for found in rows} > {"good"}


def test_the_trap_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "trap").exists()


def test_there_are_many() -> None:
    assert len(CASES) == sum(map(len, (CALLS, ROWS, BATCH_ROWS))) >= 60
