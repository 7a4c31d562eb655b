"""Converting GGUF files: weights, configuration and tokenizer are those of the model in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.integrations.gguf import gguf_tokenizer_mapping

from dakrun.cli import main
from dakrun.config import LinearRope, SamplingParams
from dakrun.errors import CannotRun, DakrunError, UsageError
from dakrun.llm import LLM
from dakrun.models import read_model_config
from dakrun.requests import Tokenizer
from dakrun.weights import convert_gguf
from dakrun.weights.convert import Conversion

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
COMMON: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(rms_norm_eps=1e-5, **COMMON),
    "qwen2": Qwen2Config(tie_word_embeddings=True, **COMMON),
    "qwen3": Qwen3Config(head_dim=64, **COMMON),
}
NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    *path, module, kind = name.split(".")
    layer = f"blk.{path[2]}." if "layers" in path else ""
    return f"{layer}{NAMES[module]}.{kind}"


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head in the order of llama.cpp: first, middle, second, one after the middle, ..."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def write(
    path: Path,
    family: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "",
    extra: tuple[str, ...] = (),
    tokenizer: tuple[str, str] = ("gpt2", "qwen2"),
    more: Callable[[gguf.GGUFWriter], object] = lambda file: None,
) -> PreTrainedModel:
    """The tiny model of `family` as a GGUF file, its matrices of type `kind`.

    `tokenizer` names the vocabulary's kind and its pre-tokenizer; `more` adds further keys.
    """
    model, config = model_of(family), CONFIGS[family]
    file = gguf.GGUFWriter(path, architecture or family)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "qwen3":
        file.add_key_length(config.head_dim)
    file.add_tokenizer_model(tokenizer[0])
    file.add_tokenizer_pre(tokenizer[1])
    if tokenizer[0] == "llama":
        file.add_token_scores([-float(i) for i in range(300)])
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = ["<pad>", "<s>", "</s>", *letters, "ab", *(f"<{i}>" for i in range(270))]
    file.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    file.add_token_types([control] * 3 + [normal] * 297)
    file.add_token_merges(["a b"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_pad_token_id(0)
    file.add_chat_template(TEMPLATE)
    more(file)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if family == "llama" and part in name:
                values = interleaved(values, heads)
        stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(values.numpy(), stored)
        file.add_tensor(gguf_name(name), data, raw_dtype=stored)
    for name in extra:
        file.add_tensor(name, torch.ones(32).numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_it_is_the_same_model(family: str, tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", family)
    found = convert_gguf(tmp_path / "m.gguf", tmp_path / "new", dtype="float32", shard_bytes=90_000)
    assert found.files > 1
    tensors = {}
    for path in (tmp_path / "new").glob("*.safetensors"):
        tensors |= load_file(path)
    wanted = dict(model.state_dict())
    if family == "qwen2":
        del wanted["lm_head.weight"]
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())
    config = read_model_config(tmp_path / "new")
    assert config.norm_eps == CONFIGS[family].rms_norm_eps
    prompt = [5, 80, 7, 200, 31]
    output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    with LLM(tmp_path / "new", device="cpu", batch_size=1, max_model_len=64) as llm:
        ours = llm.generate([prompt], SamplingParams(max_tokens=20))[0].token_ids
    theirs = output[0, len(prompt) :].tolist()
    assert list(ours) == theirs[: len(ours)] and len(theirs) - len(ours) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantized_weights_are_dequantized(dtype: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    model = write(tmp_path / "m.gguf", "llama", kind)
    result = CliRunner().invoke(
        main, ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "new"), "--dtype", dtype]
    )
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert tensors[name].dtype == getattr(torch, dtype)
        limit = tensor.abs().max() / 100  # eight bits of a block of 32
        assert (tensors[name].float() - tensor).abs().max() <= limit, name
    name = "model.layers.0.mlp.up_proj.weight"
    stored = gguf.quantize(model.state_dict()[name].numpy(), kind)
    exact = torch.from_numpy(gguf.dequantize(stored, kind))
    assert torch.equal(tensors[name], exact.to(getattr(torch, dtype)))


def test_the_tokenizer_and_its_chat_template_are_there(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen2")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "new")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    chat = [{"role": "user", "content": "cab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<user>cab"
    assert tokenizer.encode("cab", add_special_tokens=False)[0] == 3 + ord("c") - ord("a")
    config = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)


def converted(folder: Path, **options: Any) -> Conversion:
    write(folder / "m.gguf", "llama", **options)
    return convert_gguf(folder / "m.gguf", folder / "new", dtype="float32")


def test_all_end_tokens_end_a_completion(tmp_path: Path) -> None:
    def ends(file: gguf.GGUFWriter) -> None:
        file.add_eot_token_id(40)
        file.add_eom_token_id(41)

    found = converted(tmp_path, more=ends)
    assert read_model_config(tmp_path / "new").eos_token_ids == (2, 40, 41) and not found.unread


@pytest.mark.parametrize(
    ("tokenizer", "add", "begins"),
    [
        (("gpt2", "llama-bpe"), None, True),
        (("gpt2", "tekken"), None, True),
        (("gpt2", "qwen2"), None, False),
        (("gpt2", "llama-bpe"), False, False),
        (("gpt2", "qwen2"), True, True),
        (("llama", "default"), None, True),
        (("llama", "default"), False, False),
    ],
)
def test_texts_begin_with_bos_where_they_do_in_llama_cpp(
    tokenizer: tuple[str, str], add: bool | None, begins: bool, tmp_path: Path
) -> None:
    def flag(file: gguf.GGUFWriter) -> None:
        if add is not None:
            file.add_add_bos_token(add)

    converted(tmp_path, tokenizer=tokenizer, more=flag)
    ids = Tokenizer.load(tmp_path / "new").encode("cab")
    assert ids[-2:] == (3 + ord("c") - ord("a"), 29)
    assert ids[:-2] == ((1,) if begins else ())


def test_a_word_that_is_a_token_is_whole_where_it_is_in_llama_cpp(tmp_path: Path) -> None:
    for pre, whole in (("llama-bpe", True), ("qwen2", False)):
        folder = tmp_path / pre
        folder.mkdir()
        converted(folder, tokenizer=("gpt2", pre))
        backend = AutoTokenizer.from_pretrained(folder / "new").backend_tokenizer
        assert backend.model.ignore_merges is whole


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_rope_is_scaled_linearly_without_a_type(key: str, tmp_path: Path) -> None:
    found = converted(tmp_path, more=lambda file: file.add_float32(f"llama.{key}", 4.0))
    assert read_model_config(tmp_path / "new").rope_scaling == LinearRope(4.0)
    assert not found.unread


def test_a_transformers_that_splits_texts_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.17 has no table of pre-tokenizers."""
    monkeypatch.delattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", raising=False)
    with pytest.raises(CannotRun, match="with a table of pre-tokenizers, as 5") as refused:
        converted(tmp_path)
    assert refused.value.hint == "pip install 'dakrun[gguf]'"
    assert not (tmp_path / "new").exists()


def test_keys_that_may_change_the_output_are_named_in_one_warning(tmp_path: Path) -> None:
    def unknown(file: gguf.GGUFWriter) -> None:
        file.add_float32("llama.logit_scale", 0.5)
        file.add_sliding_window(64)
        file.add_float32("general.sampling.min_p", 0.25)
        file.add_name("of no weight")
        file.add_rope_dimension_count(32)

    write(tmp_path / "m.gguf", "llama", tokenizer=("gpt2", "smollm"), more=unknown)
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "new")])
    assert result.exit_code == 0
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert warnings == [
        "warning: not translated, and may change the output: tokenizer.ggml.pre = smollm, "
        "llama.logit_scale = 0.5, llama.attention.sliding_window = 64, "
        "general.sampling.min_p = 0.25"
    ]


def test_suggested_sampling_becomes_the_generation_config(tmp_path: Path) -> None:
    def sampling(file: gguf.GGUFWriter) -> None:
        file.add_float32("general.sampling.temp", 0.6)
        file.add_int32("general.sampling.top_k", 20)

    assert not converted(tmp_path, more=sampling).unread
    text = (tmp_path / "new" / "generation_config.json").read_text(encoding="utf-8")
    wanted = {"eos_token_id": [2], "temperature": 0.6, "top_k": 20, "do_sample": True}
    assert json.loads(text) == wanted


def test_values_that_no_such_model_has_here_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "llama", more=lambda file: file.add_causal_attention(False))
    refused(tmp_path / "a.gguf", CannotRun, "llama.attention.causal is False, not True")
    write(tmp_path / "b.gguf", "llama", more=lambda file: file.add_rope_dimension_count(16))
    refused(tmp_path / "b.gguf", CannotRun, "llama.rope.dimension_count is 16, not 32")


def refused(source: Path, kind: type[DakrunError], said: str) -> None:
    target = source.parent / "refused"
    with pytest.raises(kind, match=said) as caught:
        convert_gguf(source, target)
    assert caught.value.hint and not target.exists()
    assert not [path for path in source.parent.iterdir() if path.name.startswith(".")]


def test_what_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "gemma.gguf", "llama", architecture="gemma")
    refused(tmp_path / "gemma.gguf", CannotRun, "architecture gemma is not supported")
    write(tmp_path / "more.gguf", "llama", extra=("blk.0.ffn_gate_inp.weight",))
    refused(tmp_path / "more.gguf", CannotRun, "tensor blk.0.ffn_gate_inp.weight is not known")
    (tmp_path / "text.gguf").write_text("nothing of the kind" * 9, encoding="utf-8")
    refused(tmp_path / "text.gguf", UsageError, "not a GGUF file, or damaged")
    refused(tmp_path / "missing.gguf", UsageError, "No such file")
    whole = (tmp_path / "gemma.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.gguf", UsageError, "not a GGUF file, or damaged")
