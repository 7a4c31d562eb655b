"""Quantized checkpoints, from the file to tokens: nothing is re-quantised, no bit changes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import hopper
from quantised import CONFIG, FORMATS, compressed, fp8, gptq, save
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from dakrun.config import SamplingParams
from dakrun.engine import tier_accesses
from dakrun.errors import CannotRun, UsageError
from dakrun.formats import QuantisedRows, Rows
from dakrun.kernels.runtime import card_of
from dakrun.kernels.unpack import unpack
from dakrun.llm import LLM
from dakrun.memory.tiers import allocate_tiers
from dakrun.models import decoder_of
from dakrun.models.quantization import parse_quantization
from dakrun.nn import SplitKGEMM
from dakrun.plan import Policy
from dakrun.weights import Checkpoint, Packing, load, loading, tier_capacities

PROMPTS = [[5, 77, 201, 9], [300, 2, 4], [17]]
NEW_TOKENS = 12
POLICY = Policy(offload_ratio=0.4, kv_offload_ratio=0.5)
CPU = torch.device("cpu")
INT4 = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
}  # fmt: skip


def llm_of(directory: Path, dtype: str = "float32") -> LLM:
    return LLM(directory, device="cpu", batch_size=3, dtype=dtype, policy=POLICY)  # type: ignore[arg-type]


def tokens_of(llm: LLM) -> list[list[int]]:
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    return [list(result.token_ids) for result in found]


def expected(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """On the dequantised weights, which are in the tiers bit for bit."""
    model = save(tmp_path, *FORMATS[name])
    llm = llm_of(tmp_path)
    for layer, of in enumerate(model.model.layers):
        stored = {
            "qkv": [of.self_attn.q_proj, of.self_attn.k_proj, of.self_attn.v_proj],
            "o": [of.self_attn.o_proj],
            "gate_up": [of.mlp.gate_proj, of.mlp.up_proj],
            "down": [of.mlp.down_proj],
        }
        for op, modules in stored.items():
            matrix = llm.engine.runner.weights.matrices[f"layers.{layer}.{op}"]
            assert isinstance(matrix.format, QuantisedRows)
            assert {part.tier for part in matrix.parts} == {"hbm", "host"}
            assert torch.equal(matrix.dense(), torch.cat([m.weight.data for m in modules]))
    assert tokens_of(llm) == expected(model)
    for number, tier in enumerate(llm.plan.tiers):
        parts = (p for m in llm.engine.runner.weights.matrices.values() for p in m.parts)
        held = sum(part.nbytes for part in parts if part.tier == tier)
        assert held == llm.plan.memory(number)["weights"]


@pytest.mark.parametrize("name", ["awq", "gptq-zeros", "fp8-block", "ct-4bit-zeros", "nvfp4"])
def test_packed_for_kernels_in_small_pieces(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates alternate with ups, row blocks are in the tiers' order, no norm is folded."""
    monkeypatch.setattr(loading, "PIECE_ELEMENTS", 24 * 256)
    model = save(tmp_path, *FORMATS[name])
    plan = llm_of(tmp_path, "bfloat16").plan
    tiers = allocate_tiers(tier_capacities(plan, packed=True), CPU)
    card = hopper(5)
    with Checkpoint(tmp_path) as source:
        packing = Packing(tier_accesses(plan, card), card)
        source.check(decoder_of(plan.model))
        matrices = load(source, plan, tiers, CPU, packing=packing).matrices
    layer = model.model.layers[1]
    qkv = [getattr(layer.self_attn, f"{x}_proj").weight.data for x in "qkv"]
    assert torch.equal(matrices["layers.1.qkv"].dense(), torch.cat(qkv).bfloat16())
    both = torch.stack([layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data], 1)
    assert torch.equal(matrices["layers.1.gate_up"].dense(), both.flatten(0, 1).bfloat16())
    assert matrices["layers.1.gate_up"].for_kernels and len(matrices["layers.1.down"].parts) == 2


def test_modules_that_stay_in_16_bits(tmp_path: Path) -> None:
    """A whole op of one layer, and a part of a fused matrix, which is then all in 16 bits."""
    settings, write = FORMATS["ct-4bit"]
    ignored = ["lm_head", "model.layers.1.mlp.down_proj", "re:.*layers.0.self_attn.v_proj"]
    plain = ["layers.1.mlp.down_proj", "layers.0.self_attn.v_proj"]
    model = save(tmp_path, settings | {"ignore": ignored}, write, plain=plain)
    llm = llm_of(tmp_path)
    formats = {op.op.name: op.op.stored().name for op in llm.plan.weights()}
    assert {name: text.startswith("int4") for name, text in formats.items()} == {
        "embedding": False, "lm_head": False, "qkv": False, "qkv.2": True, "o": True,
        "gate_up": True, "down": True, "down.2": False,
    }  # fmt: skip
    matrices = llm.engine.runner.weights.matrices
    for layer in (0, 1):
        attention = model.model.layers[layer].self_attn
        parts = [getattr(attention, f"{x}_proj").weight.data for x in "qkv"]
        assert torch.equal(matrices[f"layers.{layer}.qkv"].dense(), torch.cat(parts))
    assert isinstance(matrices["layers.0.qkv"].format, Rows)
    assert tokens_of(llm) == expected(model)


def test_dynamic_patterns_of_gptq_begin_with_the_name_and_the_first_counts(tmp_path: Path) -> None:
    settings, _ = FORMATS["gptq"]
    patterns = {"-:down_proj": {}, "+:.*up_proj": {"bits": 8}, "-:model.*mlp.(up|gate)": {}}

    def write(weight: torch.Tensor) -> Any:
        return gptq(weight, bits=8 if next(names).endswith("up_proj") else 4)

    names = iter(
        f"{i}.{name}"
        for i in (0, 1)
        for name in ("down_proj", "up_proj", "k_proj", "o_proj", "q_proj", "v_proj")
    )
    model = save(tmp_path, settings | {"dynamic": patterns}, write, plain=["gate_proj"])
    assert tokens_of(llm_of(tmp_path)) == expected(model)


def test_biases_of_zeros_that_old_writers_of_gptq_add(tmp_path: Path) -> None:
    model = save(tmp_path, *FORMATS["gptq"])
    changed(tmp_path, bias=torch.zeros(256).half())
    assert tokens_of(llm_of(tmp_path)) == expected(model)
    changed(tmp_path, bias=torch.eye(256)[3].half())
    with pytest.raises(CannotRun, match=rf"does not account for tensor {DOWN}.bias"):
        llm_of(tmp_path)


def test_a_dot_behind_the_name_of_a_layer_that_stays_in_16_bits(tmp_path: Path) -> None:
    settings, write = FORMATS["awq"]
    settings = settings | {"modules_to_not_convert": ["model.layers.1."]}
    model = save(tmp_path, settings, write, plain=["layers.1."])
    assert tokens_of(llm_of(tmp_path)) == expected(model)


def test_layers_may_mix_formats(tmp_path: Path) -> None:
    """compressed-tensors' groups: attention in 8 bits of floats, the rest in 4 bits."""
    channel = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
            "group_1": {
                "targets": ["re:.*self_attn.*"], "weights": channel, "format": "float-quantized",
            },
        },
        "ignore": ["lm_head"],
    }  # fmt: skip

    def write(weight: torch.Tensor) -> Any:
        if weight.shape[0] == 320 or weight.shape[1] == 320:  # of the feed-forward
            return compressed(weight, "pack-quantized", **INT4)
        return compressed(weight, "float-quantized", **channel)

    model = save(tmp_path, settings, write)
    llm = llm_of(tmp_path)
    codes = {
        op.op.name: stored.layout.code
        for op in llm.plan.weights()
        if isinstance(stored := op.op.stored(), QuantisedRows)
    }
    assert codes == {"qkv": "e4m3", "o": "e4m3", "gate_up": "int4", "down": "int4"}
    assert tokens_of(llm) == expected(model)


@pytest.mark.parametrize("name", ["fp8-small-block", "awq"])
def test_experts_may_be_quantized(name: str, tmp_path: Path) -> None:
    """The router and the lm_head stay in 16 bits."""
    config = Qwen3MoeConfig(
        **(CONFIG | {"intermediate_size": 96}), head_dim=64, num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=96, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    settings, write = FORMATS[name]
    settings = settings | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}
    model = save(tmp_path, settings, write, config=config)
    llm = llm_of(tmp_path)
    quantised = {op.op.name for op in llm.plan.weights() if op.op.quantized}
    assert {"qkv", "o"} < quantised and len(quantised) == 4
    assert tokens_of(llm) == expected(model)


def test_dummy_weights_take_the_same_formats(tmp_path: Path) -> None:
    save(tmp_path, *FORMATS["awq"])
    llm = LLM(tmp_path, device="cpu", batch_size=3, load_format="dummy", policy=POLICY)
    matrix = llm.engine.runner.weights.matrices["layers.0.down"]
    assert isinstance(matrix.format, QuantisedRows) and matrix.format.layout.zeros
    assert matrix.dense().float().std().item() == pytest.approx(0.02, rel=0.1)
    here = llm.engine.runner.weights
    whole = Policy(offload_ratio=0.0)
    other = LLM(tmp_path, device="cpu", batch_size=3, load_format="dummy", policy=whole)
    for name, found in here.matrices.items():
        assert torch.equal(found.dense(), other.engine.runner.weights.matrices[name].dense())


def changed(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of layer 0's down projection by their suffix; None removes one."""
    file = directory / "model.safetensors"
    found = load_file(file)
    for suffix, tensor in tensors.items():
        name = f"model.layers.0.mlp.down_proj.{suffix}"
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, file, metadata={"format": "pt"})


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "tensors", "said"),
    [
        ("awq", {"qzeros": None}, f"tensor {DOWN}.qzeros is missing: config.json says 4-bit AWQ"),
        ("fp8-block", {"weight_scale_inv": None}, f"{DOWN}.weight_scale_inv is missing"),
        ("fp8-block", {"weight_scale_inv": torch.ones(2, 2)},
         "is 2x2, FP8, a scale per 128x128 block of 256x320 has 2x3"),
        ("fp8-block", {"weight_scale_inv": torch.full((2, 3), torch.nan)},
         "a scale is NaN or infinite"),
        ("gptq", {"scales": torch.full((10, 256), torch.inf).half()}, "a scale is NaN or infinite"),
        ("gptq", {"qweight": torch.zeros(40, 128, dtype=torch.int32)},
         "is 40x128, 4-bit GPTQ, groups of 32 of 256x320 has 40x256"),
        ("gptq", {"qzeros": torch.zeros(10, 32, dtype=torch.int32)}, "not half the range"),
        ("gptq", {"g_idx": torch.zeros(320, dtype=torch.int32)}, "activation order (desc_act)"),
        ("ct-int8", {"weight": torch.zeros(256, 320)}, "is stored as F32, not as I8"),
        ("nvfp4", {"weight_scale_2": torch.tensor(torch.nan)}, "a scale is NaN or infinite"),
        ("ct-4bit", {"weight_zero_point": torch.zeros(32, 10, dtype=torch.int32)},
         f"config.json does not account for tensor {DOWN}.weight_zero_point"),
        ("ct-int8", {"weight_zero_point": torch.ones(256, 1, dtype=torch.int8)},
         f"does not account for tensor {DOWN}.weight_zero_point"),
        ("ct-4bit", {"weight_g_idx": torch.arange(320, dtype=torch.int32)},
         f"does not account for tensor {DOWN}.weight_g_idx"),
        ("fp8-tensor", {"weight_scale_2": torch.ones(1)},
         f"does not account for tensor {DOWN}.weight_scale_2"),
    ],
)  # fmt: skip
def test_malformed_tensors(
    name: str, tensors: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    save(tmp_path, *FORMATS[name])
    changed(tmp_path, **tensors)
    with pytest.raises(CannotRun) as error:
        llm_of(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value) and error.value.hint


def test_zeros_that_config_denies_are_not_left_out(tmp_path: Path) -> None:
    settings, write = FORMATS["awq"]
    save(tmp_path, settings | {"zero_point": False}, write)
    with pytest.raises(CannotRun, match=r"does not account for tensor \S*down_proj.qzeros"):
        llm_of(tmp_path)


def test_a_quantized_head_of_a_tied_model_is_not_left_out(tmp_path: Path) -> None:
    config = LlamaConfig(**CONFIG, tie_word_embeddings=True)
    save(tmp_path, *FORMATS["gptq"], config=config)
    file = tmp_path / "model.safetensors"
    head = {"lm_head.qweight": torch.zeros(32, 331, dtype=torch.int32)}
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    with pytest.raises(CannotRun, match=r"does not account for tensor lm_head.qweight"):
        llm_of(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "activation order (desc_act)"),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "weights of 2 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in the order of 'gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "w4a8_awq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48 * 3}, "do not divide"),
        (
            {"config_groups": {"g": {"weights": INT4 | {"actorder": "group"}}}},
            "activation order (actorder group)",
        ),
        (
            {"config_groups": {"g": {"weights": INT4}}, "format": "mxfp4-pack-quantized"},
            "mxfp4-pack-quantized",
        ),
    ],
)
def test_formats_that_are_not_supported(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save(tmp_path, settings, FORMATS["awq"][1])
    with pytest.raises(CannotRun) as error:
        llm_of(tmp_path)
    assert said in str(error.value) and error.value.hint and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("awq", "quantization_config is 'awq', not an object"),
        ({"quant_method": 4}, "quant_method is 4, not a string"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128], not"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0, not"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        ({"bits": 4}, "quant_method is missing"),
        ([], "quantization_config is [], not an object"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "gptq", "bits": "4"}, "bits is '4', not an integer"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "dynamic is [1], not an object"),
        (
            {
                "config_groups": {"g": {"targets": ["re:("], "weights": INT4}},
                "format": "pack-quantized",
            },
            "not made of regular expressions",
        ),
    ],
)
def test_malformed_settings(settings: Any, said: str, tmp_path: Path) -> None:
    save(tmp_path, settings, FORMATS["awq"][1])
    with pytest.raises(UsageError) as error:
        llm_of(tmp_path)
    assert said in str(error.value) and error.value.hint


@pytest.mark.parametrize(
    ("file", "content", "write"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}, gptq),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 32, "version": "GEMM"},
            FORMATS["awq"][1],
        ),
        (
            "hf_quant_config.json",
            {"producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
            lambda weight: fp8(weight, block=None),
        ),
    ],
)
def test_settings_in_a_file_of_their_own(
    file: str, content: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    model = save(tmp_path, {}, write)
    (tmp_path / file).write_text(json.dumps(content))
    assert tokens_of(llm_of(tmp_path)) == expected(model)


@pytest.mark.parametrize("name", ["awq", "gptq-8bit", "fp8-block", "ct-4bit-zeros", "ct-nvfp4"])
def test_a_module_of_quantized_tensors(name: str) -> None:
    settings, write = FORMATS[name]
    tensors, dense = write(torch.randn(72, 256).bfloat16() / 8)
    stored = parse_quantization(settings, name="m", dtype="bfloat16").of("up_proj")
    assert stored is not None
    module = SplitKGEMM.from_quantized(
        stored, tensors, 256, 72, torch.ones(72), ratio=0.4, dtype=torch.float32
    )
    x = torch.randn(5, 256)
    assert torch.equal(module.weight.dense(), dense) and module.ratio == pytest.approx(0.4, abs=0.1)
    torch.testing.assert_close(module(x), x @ dense.T + 1)
    with pytest.raises(RuntimeError, match="loaded by from_quantized"):
        module.load_state_dict({"weight": dense, "bias": torch.ones(72)})
    module.close()
    missing = {key: each for key, each in tensors.items() if "scale" not in key}
    with pytest.raises(ValueError, match=r"expected a tensor .*scale"):
        SplitKGEMM.from_quantized(stored, missing, 256, 72)
    with pytest.raises(ValueError, match=r"expected .* as .*, got"):
        SplitKGEMM.from_quantized(stored, tensors, 256, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_runs_what_is_stored(name: str, dtype: str, tmp_path: Path) -> None:
    """Weights are bit for bit those of the checkpoint; offloaded equals resident."""
    model = save(tmp_path, *FORMATS[name])
    tokens = []
    for policy in (Policy(offload_ratio=0.0), POLICY, replace(POLICY, transport="staged")):
        with LLM(tmp_path, device="cuda", batch_size=3, dtype=dtype, policy=policy) as llm:
            assert llm.fallback is None
            tokens.append(tokens_of(llm))
            plan = llm.plan
    assert tokens[0] == tokens[1] == tokens[2]
    device = torch.device("cuda", torch.cuda.current_device())
    with (
        Checkpoint(tmp_path) as source,
        allocate_tiers(tier_capacities(plan, packed=True), device) as tiers,
    ):
        packing = Packing(tier_accesses(plan, card_of(device)), card_of(device))
        source.check(decoder_of(plan.model))
        matrices = load(source, plan, tiers, device, packing=packing).matrices
        exact = model.model.layers[1].mlp.down_proj.weight.data.to(getattr(torch, dtype))
        assert torch.equal(matrices["layers.1.down"].dense(), exact)
        out = torch.empty_like(exact, device=device)
        unpack(matrices["layers.1.down"], out)
        assert torch.equal(out.cpu(), exact)
