"""config.json in its old and new forms, what is refused and how it is said."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dakrun.config import Llama3Rope, SamplingParams, Workload
from dakrun.errors import CannotRun, DakrunError, UsageError
from dakrun.hardware import load_profile
from dakrun.models import parse_model_config, read_json_object, read_model_config
from dakrun.plan import Policy, make_plan

OPT: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128008],
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ORIGINAL = "original_max_position_embeddings"
LLAMA3_ROPE = Llama3Rope(
    factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192
)


def one_line(error: DakrunError) -> str:
    """The message, after checking that it and the hint are one line each."""
    assert error.hint and "\n" not in f"{error}{error.hint}"
    return str(error)


def test_opt() -> None:
    model = parse_model_config(OPT, name="m")
    assert (model.family, model.head_dim, model.num_kv_heads, model.dtype) == (
        "opt", 64, 12, "float16",
    )  # fmt: skip
    assert model.tied_embeddings and model.attention_bias and model.mlp_bias
    assert model.pre_norm and model.final_norm and model.norm_affine
    assert model.eos_token_ids == (2,)
    assert model.kv_bytes_per_token == 2 * 12 * 768 * 2


def test_opt_350m_is_post_norm_with_projected_embeddings() -> None:
    raw = {**OPT, "hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512}
    model = parse_model_config({**raw, "do_layer_norm_before": False}, name="m")
    assert (model.embed_size, model.pre_norm, model.final_norm) == (512, False, False)


def test_galactica_like_opt_has_no_biases_nor_affine_norms() -> None:
    raw = {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}
    model = parse_model_config({**raw, "_remove_final_layer_norm": True}, name="m")
    assert not (model.attention_bias or model.mlp_bias or model.norm_affine or model.final_norm)


def test_llama() -> None:
    model = parse_model_config(LLAMA, name="m")
    assert (model.head_dim, model.q_size, model.kv_size) == (128, 4096, 1024)
    assert (model.rope_theta, model.rope_scaling, model.norm_eps) == (5e5, None, 1e-5)
    assert model.eos_token_ids == (128001, 128008)
    assert not model.tied_embeddings
    assert model.kv_bytes_per_token == 2 * 32 * 1024 * 2
    assert model.with_dtype("float32").kv_bytes_per_token == 2 * model.kv_bytes_per_token


def test_llama_without_the_keys_that_came_later() -> None:
    later = ("num_key_value_heads", "rope_theta", "torch_dtype", "eos_token_id")
    model = parse_model_config({k: v for k, v in LLAMA.items() if k not in later}, name="m")
    assert (model.num_kv_heads, model.rope_theta, model.dtype) == (32, 10_000.0, "float32")


@pytest.mark.parametrize(
    ("change", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 5e5, None),
        ({"rope_scaling": ROPE}, 5e5, LLAMA3_ROPE),
        (
            {"rope_scaling": {**ROPE, "type": ROPE["rope_type"], "rope_type": None}},
            5e5,
            LLAMA3_ROPE,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 1e4, None),
        ({"rope_parameters": {**ROPE, "rope_theta": 2e4}, "rope_theta": None}, 2e4, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": ROPE}, 5e5, LLAMA3_ROPE),
    ],
)
def test_rope_formats(change: dict[str, Any], theta: float, scaling: Llama3Rope | None) -> None:
    model = parse_model_config({**LLAMA, **change}, name="m")
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("raw", [OPT, LLAMA])
def test_a_family_that_is_not_named_is_the_architecture_s(raw: dict[str, Any]) -> None:
    bare = {key: value for key, value in raw.items() if key != "model_type"}
    assert parse_model_config(bare, name="m") == parse_model_config(raw, name="m")


WINDOW = {"sliding_window": 1024}
FLAG = {**WINDOW, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "change", "positions"),
    [
        ("llama", {}, 131072),
        ("llama", WINDOW, 1024),  # transformers' cache keeps no more
        ("mistral", WINDOW, 1024),
        ("mistral", {}, 4096),  # transformers' default
        ("mistral", {"sliding_window": None}, 131072),
        ("qwen2", WINDOW, 131072),
        ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 5}, 1024),
        ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 0}, 1024),
        ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 32}, 131072),
        (
            "qwen3",
            {**WINDOW, "use_sliding_window": True, "layer_types": ["full_attention"] * 32},
            131072,
        ),
        ("qwen2", {**WINDOW, "layer_types": ["attention"] * 31 + ["sliding_attention"]}, 1024),
        ("mistral", {"layer_types": ["full_attention"] * 32}, 131072),
        # These families do not read layer_types.
        ("mixtral", {**WINDOW, "layer_types": ["full_attention"] * 32}, 1024),
        ("qwen3_moe", {**FLAG, "layer_types": ["full_attention"] * 32}, 1024),
        ("phi3", {**WINDOW, "layer_types": ["full_attention"] * 32}, 1024),
        ("phi3", {}, 131072),
        ("phi3", WINDOW, 1024),
    ],
)
def test_positions_end_with_the_sliding_window(
    family: str, change: dict[str, Any], positions: int
) -> None:
    raw = {**LLAMA, "model_type": family, "num_hidden_layers": 32, **change}
    model = parse_model_config(raw, name="m")
    assert (model.family, model.max_positions) == (family, positions)
    if positions == 131072:
        assert not model.limited_by
        return
    work = Workload(batch_size=1, prompt_len=1, new_tokens=1, max_model_len=positions + 1)
    said = rf"is beyond the {positions} positions of m \(its sliding window\)"
    with pytest.raises(UsageError, match=said):
        make_plan(model, work, load_profile("h200-pcie5"), Policy())


def test_new_dtype_key_wins() -> None:
    assert parse_model_config({**LLAMA, "dtype": "float32"}, name="m").dtype == "float32"
    assert parse_model_config({**LLAMA, "dtype": "torch.float16"}, name="m").dtype == "float16"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({**LLAMA, "quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({**LLAMA, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
         "GptOssForCausalLM"),
        ({**LLAMA, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
         "Qwen2MoeForCausalLM"),
        ({**LLAMA, "model_type": "deepseek_v3"}, "deepseek_v3"),
        ({**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.75}, "a part of each head"),
        ({**LLAMA, "model_type": "gemma"}, "gemma"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"architectures": 5}, "(none named)"),
        ({}, "(none named)"),
        ({**OPT, "activation_function": "gelu"}, "activation 'gelu'"),
        ({**LLAMA, "hidden_act": "gelu"}, "activation 'gelu'"),
        ({**LLAMA, "rope_scaling": {"type": "ntk", "factor": 2}}, "rope type 'ntk'"),
        ({**LLAMA, "rope_scaling": {**ROPE, "rope_type": "proportional"}}, "'proportional'"),
        ({**LLAMA, "torch_dtype": "float64"}, "dtype 'float64'"),
        ({**LLAMA, "is_causal": False}, "attention to later tokens"),
        ({**OPT, "is_causal": False}, "attention to later tokens"),
        ({**LLAMA, "attention_chunk_size": 8192}, "attention within chunks"),
        ({**LLAMA, "per_layer_config": {"1": {"rms_norm_eps": 1}}}, "per_layer_config"),
        ({**LLAMA, "rope_parameters": {"full_attention": ROPE}}, "RoPE that differs between"),
        ({**LLAMA, "model_type": "phi3", "rope_scaling": ROPE}, "rope type 'llama3' of Phi-3"),
        ({**LLAMA, "model_type": "qwen3", "layer_types": ["linear_attention"] * 32},
         "layers of the kind 'linear_attention'"),
        ({**LLAMA, "model_type": ["llama"]}, "['llama'] is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_run(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotRun) as caught:
        parse_model_config(raw, name="m")
    assert said in one_line(caught.value) and caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({k: v for k, v in OPT.items() if k != "ffn_dim"}, "no 'ffn_dim'"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "no 'hidden_size'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3"}}, "no 'factor'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        (
            {**LLAMA, "rope_scaling": {**ROPE, "original_max_position_embeddings": 8192.5}},
            "original_max_position_embeddings is 8192.5, not a positive integer",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1, "2"]}},
            'short_factor is [1, "2"], not a list of numbers',
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 0.5}},
            "yarn rope scaling",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.5]}},
            "longrope has 1 short factors, not 64",
        ),
        (
            {**LLAMA, "model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4}},
            "short_factor is null",
        ),
        ({**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention"]}, "of 32 kinds"),
        (
            {
                **LLAMA,
                "model_type": "qwen2",
                "layer_types": ["sliding_attention"] * 32,
                "sliding_window": None,
            },
            "sliding_window is null",
        ),
        ({**LLAMA, "vocab_size": "128256"}, 'vocab_size is "128256", not a positive integer'),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers is true"),
        ({**LLAMA, "intermediate_size": 14336.5}, "intermediate_size is 14336.5"),
        ({**LLAMA, "hidden_size": 4095}, "not a multiple of 32"),
        ({**LLAMA, "num_attention_heads": "x"}, 'num_attention_heads is "x"'),
        ({**LLAMA, "num_key_value_heads": 5}, "cannot share"),
        ({**LLAMA, "head_dim": 127}, "even head_dim"),
        ({**LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps is 0,"),
        ({**LLAMA, "rope_theta": 0}, "rope_theta is 0,"),
        ({**LLAMA, "rope_parameters": {"rope_theta": -1e4}}, "parameters: rope_theta is -10000.0"),
        ({**LLAMA, "rope_theta": float("inf")}, "rope_theta is Infinity"),
        ({**LLAMA, "rope_scaling": {**ROPE, "factor": 0.5}}, "rope scaling"),
        ({**LLAMA, "rope_scaling": {**ROPE, "factor": float("nan")}}, "factor is NaN"),
        ({**LLAMA, "rope_scaling": {**ROPE, "factor": 10**400}}, "0000..., not a positive number"),
        ({**LLAMA, "rope_scaling": {**ROPE, "low_freq_factor": 0}}, "low_freq_factor is 0"),
        ({**LLAMA, "rope_scaling": {**ROPE, "high_freq_factor": float("inf")}}, "Infinity"),
        ({**LLAMA, "rope_scaling": {**ROPE, ORIGINAL: 0}}, f"{ORIGINAL} is 0"),
        ({**LLAMA, "rope_scaling": {**ROPE, ORIGINAL: -8}}, f"{ORIGINAL} is -8"),
        ({**LLAMA, "rope_scaling": {**ROPE, ORIGINAL: float("inf")}}, f"{ORIGINAL} is Infinity"),
        ({**LLAMA, "rope_scaling": {**ROPE, "factor": "much"}}, 'rope_scaling: factor is "much"'),
        ({**LLAMA, "rope_scaling": "llama3"}, 'rope_scaling is "llama3", not an object'),
        ({**LLAMA, "rms_norm_eps": "small"}, 'rms_norm_eps is "small"'),
        ({**LLAMA, "eos_token_id": {}}, "config.json: eos_token_id is {}"),
        ({**LLAMA, "eos_token_id": ["</s>"]}, "eos_token_id is ['</s>']"),
        ({**LLAMA, "eos_token_id": 2.5}, "eos_token_id is 2.5"),
        ({**LLAMA, "tie_word_embeddings": "no"}, 'tie_word_embeddings is "no", not true or false'),
    ],
)
def test_what_is_wrong(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_model_config(raw, name="m")
    assert said in one_line(caught.value) and caught.value.exit_code == 2


NO_DEFAULT = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
COUNTS = {
    "opt": (OPT, (*NO_DEFAULT, "ffn_dim", "max_position_embeddings"), ("word_embed_proj_dim",)),
    "llama": (
        LLAMA,
        (*NO_DEFAULT, "intermediate_size", "max_position_embeddings"),
        ("num_key_value_heads", "head_dim"),
    ),
}
NUMBERS = {"opt": (), "llama": ("rms_norm_eps", "rope_theta")}
FLAGS = {
    "opt": (
        *("do_layer_norm_before", "enable_bias", "tie_word_embeddings"),
        *("_remove_final_layer_norm", "layer_norm_elementwise_affine"),
    ),
    "llama": ("tie_word_embeddings", "attention_bias", "mlp_bias"),
}


@pytest.mark.parametrize("family", COUNTS)
def test_every_field_s_type_is_checked_by_its_own_name(family: str) -> None:
    raw, counts, optional = COUNTS[family]
    wrong: list[tuple[str, object, str]] = []
    for key in (*counts, *optional):
        wrong += [(key, value, "a positive integer") for value in ("64", 64.0, True, [64], {}, -1)]
    for key in NUMBERS[family]:
        wrong += [(key, value, "a positive number") for value in ("1e-5", True, [1], {}, -1)]
    for key in FLAGS[family]:
        wrong += [(key, value, "true or false") for value in ("true", 1, 0.5, [], {}, None)]
    for key in (*counts, *(key for key in NUMBERS[family] if key == "rms_norm_eps")):
        wrong.append((key, None, "a positive "))
    for key, value, expected in wrong:
        with pytest.raises(UsageError) as caught:
            parse_model_config({**raw, key: value}, name="m")
        said = one_line(caught.value)
        assert said.startswith(f"m: config.json: {key} is {json.dumps(value)}, not {expected}")
    for key in optional:  # null stands for the value that follows from the others
        absent = {k: v for k, v in raw.items() if k != key}
        derived = parse_model_config({**raw, key: None}, name="m")
        assert derived == parse_model_config(absent, name="m")


def write_model(folder: Path, raw: dict[str, Any], **files: Any) -> Path:
    folder.mkdir()
    for name, value in {"config": raw, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_a_directory_is_named_after_itself_and_generation_config_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", LLAMA, generation_config={"eos_token_id": 7})
    model = read_model_config(folder)
    assert (model.name, model.eos_token_ids) == ("mine", (7,))


def test_end_tokens_that_are_not_in_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """A negative one would be counted from the vocabulary's end."""
    raw = {**LLAMA, "eos_token_id": [2, -1, 128_256, 10**30]}
    assert parse_model_config(raw, name="m").eos_token_ids == (2,)
    folder = write_model(tmp_path / "mine", LLAMA, generation_config={"eos_token_id": [-1, 7]})
    assert read_model_config(folder).eos_token_ids == (7,)


def test_a_bad_end_token_blames_its_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", LLAMA, generation_config={"eos_token_id": "end"})
    with pytest.raises(UsageError) as caught:
        read_model_config(folder)
    assert f"{folder / 'generation_config.json'}: eos_token_id is 'end'" in one_line(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[1]", "\xff", "[" * 100_000])
def test_unreadable_config(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in one_line(caught.value)
    with pytest.raises(UsageError):
        read_json_object(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"new_tokens": -1}, "new_tokens is -1"),
        ({"prompt_len": True}, "prompt_len is True"),
        ({"max_model_len": 0}, "max_model_len is 0"),
    ],
)
def test_workload_is_of_positive_integers(change: dict[str, Any], said: str) -> None:
    good = {"batch_size": 1, "prompt_len": 1, "new_tokens": 1, "max_model_len": 2}
    with pytest.raises(UsageError, match=said):
        Workload(**{**good, **change})


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 0}, {"max_tokens": 1.5}, {"top_k": -2}, {"top_p": 0}, {"top_p": 1.1},
     {"temperature": -1}, {"temperature": float("nan")}, {"seed": "1"}, {"seed": 1 << 96},
     {"seed": 1 << 64, "n": 2}, {"stop": ("",)}, {"stop": ""}, {"stop": 5}, {"stop": ["a", 5]},
     {"stop_token_ids": 5}, {"ignore_eos": 1}, {"n": 0}, {"n": 1.0}, {"n": None},
     {"min_p": -0.1}, {"min_p": 1.01}, {"min_p": True}, {"min_tokens": -1}, {"min_tokens": 129},
     {"min_tokens": 5, "max_tokens": 4}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
     {"frequency_penalty": float("nan")}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
     {"repetition_penalty": float("inf")}, {"repetition_penalty": 1e-300},
     {"repetition_penalty": 9e-7}, {"repetition_penalty": 2e6},
     {"logit_bias": 5}, {"logit_bias": {"a": 1}},
     {"logit_bias": {-1: 1}}, {"logit_bias": {1: 101}}, {"logit_bias": {1: "2"}},
     {"logit_bias": {1.5: 2}}, {"logit_bias": {True: 2}}, {"logit_bias": {"1": 1, 1: 2}},
     {"logit_bias": dict.fromkeys(range(1025), 1)}, {"bad_words": "no"}, {"bad_words": [""]},
     {"bad_words": [" "]}, {"bad_words": [[]]}, {"bad_words": [5]}, {"bad_words": [[-1]]},
     {"bad_words": [["a"]]}, {"bad_words": ["no"] * 4097}, {"bad_words": [[1] * 4097]}],
)  # fmt: skip
def test_sampling_params_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**change)
    assert next(iter(change)) in one_line(caught.value)


def test_sampling_params_may_be_written_in_several_ways() -> None:
    assert SamplingParams(stop="end").stop == SamplingParams(stop=["end"]).stop == ("end",)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop_token_ids=[5, 6]).stop_token_ids == (5, 6)
    assert SamplingParams(seed=None) == SamplingParams(seed=0)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    biased = SamplingParams(logit_bias={"7": 1, 5: -0.5})
    assert biased == SamplingParams(logit_bias={5: -0.5, 7: 1}) == replace(biased, bad_words=None)
    assert biased.adjusts and not biased.penalizes and not SamplingParams(logit_bias={}).adjusts
    words = SamplingParams(bad_words=["no", [5, 6]])
    assert words.bad_words == ("no", (5, 6)) and words == replace(words, bad_words=words.bad_words)
    assert SamplingParams(presence_penalty=-2).penalizes
    without = SamplingParams(max_tokens=None)
    assert without.max_tokens is None and without.limit(77) == 77
    assert SamplingParams(max_tokens=9).limit(77) == 9
    assert SamplingParams(max_tokens=9).limit(7) == 7
    assert replace(SamplingParams(n=3, stop="x"), seed=4) == SamplingParams(n=3, stop="x", seed=4)
    assert pickle.loads(pickle.dumps(without)) == without


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [("detokenize", True, False), ("best_of", 1, 2),
     ("skip_special_tokens", True, False), ("allowed_token_ids", None, [1])],
)  # fmt: skip
def test_sampling_options_that_are_not_supported(name: str, neutral: object, other: object) -> None:
    assert SamplingParams(**{name: neutral}) == SamplingParams()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"^{name} is not supported$") as caught:
        SamplingParams(**{name: other})  # type: ignore[arg-type]
    assert caught.value.hint.startswith("leave it out")
