"""Models by known name, path and hub id: what each stands for, and how the hub's refusals read."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dakrun.demo import MODEL
from dakrun.errors import CannotRun, UsageError
from dakrun.formats.awq import Awq
from dakrun.formats.fp8 import Fp8
from dakrun.formats.gptq import Gptq
from dakrun.models import (
    decoder_of,
    hub,
    hub_id,
    known_model,
    known_names,
    model_config,
    model_directory,
)
from dakrun.models.known_quantized import QUANTIZED

ROOT = Path(__file__).resolve().parent.parent

# Parameters of the published checkpoints, in billions.
BILLIONS = {
    "opt-125m": 0.125, "opt-350m": 0.331, "opt-1.3b": 1.316, "opt-2.7b": 2.652,
    "opt-6.7b": 6.658, "opt-13b": 12.853, "opt-30b": 29.975, "opt-66b": 65.720,
    "llama-2-7b": 6.738, "llama-2-13b": 13.016, "llama-2-70b": 68.977,
    "llama-3-8b": 8.030, "llama-3-70b": 70.554, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554,
    "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3.3-70b": 70.554,
    "mistral-7b": 7.248, "mistral-nemo-12b": 12.248, "mistral-small-24b": 23.572,
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.770, "qwen2.5-32b": 32.764, "qwen2.5-72b": 72.706,
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191,
    "qwen3-14b": 14.768, "qwen3-32b": 32.762, "phi-4": 14.660,
    "qwen3-30b-a3b": 30.532, "qwen3-coder-30b-a3b": 30.532, "qwen3-235b-a22b": 235.094,
    "qwen3-coder-480b-a35b": 480.155, "mixtral-8x7b": 46.703, "mixtral-8x22b": 140.621,
    "olmoe-1b-7b": 6.919, "glm-4.5-air": 106.852, "glm-4.5": 352.798, "glm-4.6": 352.798,
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_known_models_have_the_published_number_of_parameters(name: str) -> None:
    model = known_model(name)
    assert model is not None
    decoder = decoder_of(model)
    stored = (*decoder.matrices(), *decoder.vectors())
    parameters = sum(math.prod(operand.shape) for operand in stored)
    assert parameters / 1e9 == pytest.approx(BILLIONS[name], abs=1e-3)
    old = name.startswith(("opt", "llama-2"))
    assert model.dtype == ("float16" if old else "bfloat16")


def test_known_names() -> None:
    assert set(BILLIONS) == set(known_names()) - set(QUANTIZED)
    assert known_model("OPT-30B") == known_model("opt-30b") == model_config("opt-30b")
    assert known_model("opt-31b") is None and hub_id("opt-31b") is None


@pytest.mark.parametrize("name", QUANTIZED)
def test_known_quantized_models_are_others_of_fewer_bits(name: str) -> None:
    base, model = QUANTIZED[name][0], known_model(name.upper())
    assert model is not None and model == model_config(name) and base in BILLIONS
    found = model.quantization
    assert found and replace(model, name=base, quantization=None) == known_model(base)
    linear, head = "model.layers.3.self_attn.q_proj", "lm_head"
    assert found.of(linear) is not None and found.of(head) is None
    assert (hub_id(name) or "").lower().endswith(name.removeprefix(base))


def test_formats_of_known_quantized_models() -> None:
    names = ("qwen3-8b-fp8", "qwen3-8b-awq", "qwen3-235b-a22b-gptq-int4", "glm-4.5-air-fp8")
    found = [model.quantization for model in map(known_model, names) if model]
    assert [(of.method, of.of("a.q_proj")) for of in found if of] == [
        ("fp8", Fp8("float32", (128, 128), "weight_scale_inv")),
        ("awq", Awq("float16", 128)),
        ("gptq", Gptq("float16", 4, 128)),
        ("compressed-tensors", Fp8("bfloat16", (1, 0))),
    ]
    assert hub_id("qwen3-coder-30b-a3b-fp8") == "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8"


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "llama-3.1-8b", "llama-3.2-1b"])
def test_llama_generations_differ_in_rope_and_length(name: str) -> None:
    model = known_model(name)
    assert model is not None
    assert (
        model.rope_theta,
        model.max_positions,
        model.rope_scaling and model.rope_scaling.factor,
    ) == {
        "llama-2-7b": (1e4, 4096, None),
        "llama-3-8b": (5e5, 8192, None),
        "llama-3.1-8b": (5e5, 131072, 8.0),
        "llama-3.2-1b": (5e5, 131072, 32.0),
    }[name]
    assert model.tied_embeddings == (name == "llama-3.2-1b")


def test_paths(tmp_path: Path) -> None:
    raw = {
        "model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert model_directory(str(folder)) == folder
    for path in (folder, folder / "config.json"):
        assert model_config(str(path)).name == "mine"
    with pytest.raises(UsageError, match="not a model directory"):
        model_directory(str(folder / "config.json"))


def test_names_that_are_nothing() -> None:
    with pytest.raises(UsageError) as caught:
        model_config("opt-30")
    assert "no such model" in str(caught.value)
    assert "opt-30b" in caught.value.hint
    with pytest.raises(UsageError, match="no such model"):
        model_config("/no/such/model")
    with pytest.raises(UsageError, match="names an architecture") as caught:
        model_directory("opt-30b")
    assert "facebook/opt-30b" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "said", "hint"),
    [
        ("GatedRepoError", "is gated", "HF_TOKEN"),
        ("RepositoryNotFoundError", "has no model", "spelling"),
        ("RemoteEntryNotFoundError", "has no config.json", "transformers"),
    ],
)
def test_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, kind: str, said: str, hint: str) -> None:
    import huggingface_hub

    monkeypatch.setattr(hub, "_no_answer", lambda name: None)

    def refuse(*_: object, **__: object) -> str:
        error = getattr(huggingface_hub.errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(CannotRun) as caught:
        model_config("someone/something")
    assert said in str(caught.value) and hint in caught.value.hint


@pytest.mark.parametrize("offline", [True, False])
def test_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no\nroute")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub, "_no_answer", lambda name: None)
    said = "HF_HUB_OFFLINE is set" if offline else "(no route)"
    for resolve in (model_config, model_directory):
        with pytest.raises(CannotRun) as caught:
            resolve("facebook/opt-30b")
        assert said in str(caught.value)
        assert "offline as opt-30b" in caught.value.hint


def test_a_snapshot_without_safetensors_needs_converting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    monkeypatch.setattr(hub, "_no_answer", lambda name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CannotRun, match="no safetensors") as caught:
        model_directory("facebook/opt-30b")
    assert "dakrun convert" in caught.value.hint
    (tmp_path / "model.safetensors").touch()
    assert model_directory("facebook/opt-30b") == tmp_path


@pytest.fixture
def closed() -> Iterator[str]:
    """The address of a host that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def with_hub(endpoint: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process whose hub is at `endpoint`, and whose cache is in `home`."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_HUB_ETAG_TIMEOUT", "HTTP_PROXY"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=environment
    )


def test_without_a_network_nothing_is_retried(closed: str, tmp_path: Path) -> None:
    run = with_hub(closed, tmp_path, "-m", "dakrun", "plan", "--model", "facebook/opt-30b")
    error, hint = run.stderr.splitlines()
    assert run.returncode == 3 and run.stdout == ""
    assert error.startswith("error: facebook/opt-30b could not be fetched from the Hugging Face")
    assert hint.startswith("hint: check the network") and "offline as opt-30b" in hint


def test_without_a_network_the_cache_is_read(closed: str, tmp_path: Path) -> None:
    commit = "0123456789" * 4
    repository = tmp_path / "hub" / "models--some--sums"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot.mkdir(parents=True)
    shutil.copy(MODEL / "config.json", snapshot)
    names = "import dakrun.models as m; print(m.model_config('some/sums').name, end=' ')"
    directory = f"{names}; print(m.model_directory('some/sums'))"
    partly = with_hub(closed, tmp_path, "-c", directory)
    assert partly.stdout == "some/sums " and "could not be fetched" in partly.stderr
    shutil.copy(MODEL / "model.safetensors", snapshot)
    wholly = with_hub(closed, tmp_path, "-c", directory)
    assert wholly.stdout == f"some/sums {snapshot}\n" and wholly.stderr == ""


def test_a_name_server_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    def search(*_: object, **__: object) -> None:
        asked.wait(60)

    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", search)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "ANSWER_S", 0.05)
    with pytest.raises(CannotRun, match=r"no answer within 0\.05 s"):
        model_config("some/thing")
    asked.set()
