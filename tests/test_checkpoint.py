"""Loading checkpoints: what is read lands in its tier, and what is wrong is said in one line."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from dakrun import llm
from dakrun.engine import build
from dakrun.errors import CannotRun
from dakrun.llm import LLM
from dakrun.models import model_config
from dakrun.plan import Policy
from dakrun.weights import Checkpoint

NAME = "llama-gqa4-rope3"
POLICY = Policy(offload_ratio=0.4, kv_offload_ratio=0.5)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(NAME, tmp_path_factory.mktemp("original") / NAME)


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / NAME)


def load(directory: Path, **options: object) -> LLM:
    return LLM(directory, device="cpu", batch_size=2, policy=POLICY, **options)  # type: ignore[arg-type]


def test_every_weight_is_where_the_plan_put_it(directory: Path) -> None:
    llm = load(directory)
    tensors = load_file(directory / "model.safetensors")
    fused = {
        "layers.1.qkv": [f"self_attn.{p}_proj" for p in "qkv"],
        "layers.2.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "layers.0.down": ["mlp.down_proj"],
    }
    for name, parts in fused.items():
        layer = name.split(".")[1]
        sources = [tensors[f"model.layers.{layer}.{part}.weight"] for part in parts]
        matrix = llm.engine.runner.weights.matrices[name]
        assert torch.equal(matrix.dense(), torch.cat(sources))
        assert {p.tier for p in matrix.parts} == {"hbm", "host"}
    for number, name in enumerate(llm.plan.tiers):
        held = sum(
            part.nbytes
            for matrix in llm.engine.runner.weights.matrices.values()
            for part in matrix.parts
            if part.tier == name
        )
        assert held == llm.plan.memory(number)["weights"]


def test_it_is_checked_once_before_memory_is_allocated(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for at, name in ((Checkpoint, "check"), (llm, "allocate_tiers"), (build, "load")):
        real = getattr(at, name)
        noted = lambda *of, n=name, do=real, **how: seen.append(n) or do(*of, **how)  # noqa: E731
        monkeypatch.setattr(at, name, noted)
    load(directory)
    assert seen == ["check", "allocate_tiers", "load"]


def test_resident_tensors_are_what_the_plan_counts(directory: Path) -> None:
    llm = load(directory)
    held = sum(t.nbytes for t in llm.engine.runner.weights.resident.values())
    assert held == llm.plan.fixed_bytes["vectors"]


@pytest.mark.parametrize("name", ["opt-like-125m", "opt-like-350m", "opt-no-bias"])
def test_opt_resident_tensors_are_what_the_plan_counts(name: str, tmp_path: Path) -> None:
    llm = load(tiny_models.save(name, tmp_path))
    held = sum(t.nbytes for t in llm.engine.runner.weights.resident.values())
    assert held == llm.plan.fixed_bytes["vectors"]


def test_dtype_is_converted_while_loading(directory: Path) -> None:
    llm = load(directory, dtype="bfloat16")
    weight = load_file(directory / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    matrix = llm.engine.runner.weights.matrices["layers.0.o"]
    assert torch.equal(matrix.dense(), weight.bfloat16())


def test_one_file_comes_before_an_index_and_other_files(directory: Path) -> None:
    """As in transformers."""
    before = load(directory).generate([[5, 6, 7]])[0].token_ids
    zeros = {k: 0 * t for k, t in load_file(directory / "model.safetensors").items()}
    save_file(zeros, directory / "zeros.safetensors")
    index = {"weight_map": dict.fromkeys(zeros, "zeros.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(directory).generate([[5, 6, 7]])[0].token_ids == before
    (directory / "model.safetensors").unlink()
    assert load(directory).generate([[5, 6, 7]])[0].token_ids != before


def test_files_without_an_index_count_together(directory: Path) -> None:
    before = load(directory).generate([[5, 6, 7]])[0].token_ids
    tensors = sorted(load_file(directory / "model.safetensors").items())
    for number in range(2):
        save_file(dict(tensors[number::2]), directory / f"part-{number}.safetensors")
    (directory / "model.safetensors").unlink()
    assert load(directory).generate([[5, 6, 7]])[0].token_ids == before


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.vision_tower.encoder.layers.0.fc1.weight",
        "v_head.summary.weight",
        "decoder.version",
    ],
)
def test_tensors_that_transformers_ignores_are_ignored(directory: Path, extra: str) -> None:
    before = load(directory).generate([[5, 6, 7]])[0].token_ids
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {extra: torch.ones(3)}, directory / "model.safetensors")
    assert load(directory).generate([[5, 6, 7]])[0].token_ids == before


@pytest.mark.parametrize("name", ["opt-like-125m", "llama-gqa3-tied"])
def test_the_head_of_a_tied_model_is_its_table(name: str, tmp_path: Path) -> None:
    """transformers takes a head that differs, whatever config.json says of it."""
    tiny_models.save(name, tmp_path)
    before = load(tmp_path).generate([[5, 6, 7]])[0].token_ids
    tensors = load_file(tmp_path / "model.safetensors")
    head = next(t for name, t in tensors.items() if name.endswith("embed_tokens.weight")).clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert load(tmp_path).generate([[5, 6, 7]])[0].token_ids == before
    table = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    alone = {name: tensor for name, tensor in tensors.items() if name != table}
    save_file(alone | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert load(tmp_path).generate([[5, 6, 7]])[0].token_ids == before
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(
        CannotRun, match=r"lm_head.weight differs from .*embed_tokens.weight"
    ) as caught:
        load(tmp_path)
    assert '"tie_word_embeddings" to false' in caught.value.hint


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_dtype_that_config_does_not_name_is_the_weights(directory: Path, dtype: str) -> None:
    """As transformers takes it; what dakrun does not compute in is computed in float32."""
    config = json.loads((directory / "config.json").read_text())
    named = {key: value for key, value in config.items() if key != "dtype"}
    (directory / "config.json").write_text(json.dumps(named))
    weights = directory / "model.safetensors"
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(weights).items()}
    save_file(stored, weights)
    expected = "float32" if dtype == "float64" else dtype
    assert load(directory).config.dtype == model_config(str(directory)).dtype == expected
    assert load(directory, dtype="float32").config.dtype == "float32"
    (directory / "config.json").write_text(json.dumps(named | {"torch_dtype": "auto"}))
    assert model_config(str(directory)).dtype == expected
    weights.unlink()
    assert model_config(str(directory)).dtype == "float32"


@pytest.mark.parametrize("name", ["opt-like-350m", NAME])
def test_names_without_the_leading_model(name: str, tmp_path: Path) -> None:
    tiny_models.save(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): t.clone() for name, t in tensors.items()}
    before = load(tmp_path).generate([[5, 6, 7]])[0].token_ids
    save_file(bare, tmp_path / "model.safetensors")
    assert load(tmp_path).generate([[5, 6, 7]])[0].token_ids == before


def test_a_budget_that_is_too_small_says_by_how_much(directory: Path) -> None:
    policy = Policy(hbm_budget=12 << 20, host_budget=1 << 20)
    with pytest.raises(CannotRun, match=r"the budgets are \d+\.\d+ MiB too small") as caught:
        LLM(directory, device="cpu", batch_size=2, policy=policy)
    assert "--host-budget" in caught.value.hint


def test_cuda_without_a_gpu_is_refused(directory: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CannotRun, match="no CUDA GPU"):
        LLM(directory, device="cuda", batch_size=2)
