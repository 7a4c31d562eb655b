"""Folders and files that are no plain checkpoint: each is named by what it is, none is ignored."""

import json
from pathlib import Path

import pytest
import tiny_models
from safetensors.torch import load_file, save_file

from dakrun.errors import CannotRun, DakrunError, UsageError
from dakrun.llm import LLM
from dakrun.models import model_config

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save("llama-gqa3-tied", tmp_path / "model")


def refused(model: Path, kind: type[DakrunError]) -> DakrunError:
    """The error that loading `model` ends with."""
    with pytest.raises(kind) as caught:
        LLM(model, device="cpu", batch_size=1)
    assert type(caught.value) is kind and caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "adapter_model.bin",
        "adapter_config.json",
        "adapters.safetensors",
    ],
)
def test_an_adapter_beside_its_base_model_is_never_ignored(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"{}")
    error = refused(folder, CannotRun)
    assert f"holds a LoRA adapter ({name})" in str(error) and "merge_and_unload" in error.hint
    with pytest.raises(CannotRun, match="LoRA adapter"):  # as plan asks
        model_config(str(folder))


def test_quantization_is_told_by_the_name_of_a_file(folder: Path) -> None:
    (folder / "quantization_config.json").write_text('{"bits": 4}')
    error = refused(folder, CannotRun)
    assert "quantized by ExLlamaV2" in str(error)
    assert "move quantization_config.json away" in error.hint


def renamed(folder: Path, old: str, new: str) -> None:
    file = folder / "model.safetensors"
    tensors = {name.replace(old, new, 1): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def test_quantization_is_told_by_the_names_of_tensors(folder: Path) -> None:
    renamed(folder, "q_proj.weight", "q_proj.qweight")
    said = str(refused(folder, CannotRun))
    assert "quantized (tensor model.layers.0.self_attn.q_proj.qweight)" in said


@pytest.mark.parametrize(
    ("old", "new", "prefix"),
    [
        ("model.", "_orig_mod.model.", "_orig_mod."),
        ("model.", "module.model.", "module."),
        ("model.layers.", "model.layers._orig_mod.", "_orig_mod."),
    ],
)
def test_the_prefix_of_a_wrapper_is_named(old: str, new: str, prefix: str, folder: Path) -> None:
    renamed(folder, old, new)
    error = refused(folder, CannotRun)
    assert f"names of its tensors have {prefix!r} added" in str(error)
    assert f"take {prefix!r} out of the names" in error.hint


def test_a_tensor_that_is_missing_is_still_said_to_be_missing(folder: Path) -> None:
    renamed(folder, "model.norm.weight", "model.other.weight")
    assert "tensor model.norm.weight is missing" in str(refused(folder, CannotRun))


def test_gguf_files_are_to_be_converted(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "gguf" / "m.Q4_0.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF\3\0\0\0")
    command = f"dakrun convert {file} OUTPUT_DIR"
    assert command in refused(file, UsageError).hint
    assert command in refused(file.parent, UsageError).hint
    with pytest.raises(UsageError, match="a GGUF file"):  # as plan asks
        model_config(str(file))
    nameless = tmp_path / "blob"
    nameless.write_bytes(file.read_bytes())
    assert "a GGUF file" in str(refused(nameless, UsageError))
    (file.parent / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert command in refused(file.parent, CannotRun).hint
    # Beside safetensors such a file is another form of the same model.
    (folder / file.name).write_bytes(file.read_bytes())
    LLM(folder, device="cpu", batch_size=1).close()


def test_a_git_lfs_pointer_in_place_of_json_is_named(folder: Path) -> None:
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(POINTER)
    error = refused(folder, UsageError)
    assert "config.json: a git-lfs pointer" in str(error) and "git lfs pull" in error.hint
    config.write_text(json.dumps(json.loads(text)))
    (folder / "tokenizer.json").write_text(POINTER)
    assert "tokenizer.json: a git-lfs pointer" in str(refused(folder, CannotRun))
