"""Weights in the formats of checkpoints, written by compressed-tensors or by their specifications.

Each writer takes a linear layer's weight and returns its tensors by suffix and the weight that they
stand for, in float32: the product of a code and its scale.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bits_of(words: list[int]) -> torch.Tensor:
    """Unsigned words as int32."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def grouped(
    weight: torch.Tensor, bits: int, group: int, *, zeros: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [M, K], scales and zeros [M, K / group], and the weight that they stand for."""
    rows, cols = weight.shape
    some = weight.float().view(rows, -1, group)
    most = (1 << bits) - 1
    if zeros:
        low, high = some.amin(2).clamp(max=0), some.amax(2).clamp(min=0)
        scales = ((high - low) / most).clamp(min=1e-6).to(dtype)
        zero = (-low / scales.float()).round().clamp(1, most)
    else:
        scales = (some.abs().amax(2) / (1 << (bits - 1))).clamp(min=1e-6).to(dtype)
        zero = torch.full_like(scales, 1 << (bits - 1)).float()
    codes = (some / scales.float()[:, :, None]).round() + zero[:, :, None]
    codes = codes.clamp(0, most)
    dense = (codes - zero[:, :, None]) * scales.float()[:, :, None]
    return codes.view(rows, cols).long(), scales, zero.long(), dense.view(rows, cols)


def words_along(values: torch.Tensor, dim: int, bits: int, order: tuple[int, ...] = ()) -> Any:
    """int32 words of neighbours along `dim`; the i-th bits of a word are neighbour order[i]."""
    count = 32 // bits
    values = values.movedim(dim, -1)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % count))
    values = values.unflatten(-1, (-1, count))[..., list(order or range(count))]
    shifts = torch.arange(count) * bits
    words = (values << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def awq(weight: torch.Tensor, *, group: int = 32) -> Written:
    """AutoAWQ's WQLinear_GEMM."""
    codes, scales, zeros, dense = grouped(weight, 4, group, zeros=True, dtype=torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words_along(codes.t(), 1, 4, order),
        "qzeros": words_along(zeros.t(), 1, 4, order),
        "scales": scales.t().contiguous(),
    }, dense


def gptq(
    weight: torch.Tensor, *, bits: int = 4, group: int = 32, sym: bool = True, version: int = 1
) -> Written:
    """GPTQModel's TorchQuantLinear."""
    codes, scales, zeros, dense = grouped(weight, bits, group, zeros=not sym, dtype=torch.float16)
    return {
        "qweight": words_along(codes.t(), 0, bits),
        "qzeros": words_along(zeros.t() - (2 - version), 1, bits),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group).to(torch.int32),
    }, dense


def fp8(weight: torch.Tensor, *, block: tuple[int, int] | None = (128, 128)) -> Written:
    """DeepSeek's FP8: weight_scale_inv for each block, or a single weight_scale."""
    rows, cols = weight.shape
    high, wide = block or (rows, cols)
    scales = torch.zeros(-(-rows // high), -(-cols // wide))
    codes, dense = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn), torch.zeros(rows, cols)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            scales[i, j] = weight[at].float().abs().max() / 448
            codes[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
            dense[at] = codes[at].float() * scales[i, j]
    if block is None:
        return {"weight": codes, "weight_scale": scales.view(())}, dense
    return {"weight": codes, "weight_scale_inv": scales}, dense


def modelopt_nvfp4(weight: torch.Tensor) -> Written:
    """ModelOpt's NVFP4: e4m3 scales times weight_scale_2."""
    rows, cols = weight.shape
    some = weight.float().view(rows, -1, 16)
    whole = some.abs().max() / (6 * 448)
    scales = (some.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    scaled = scales.float() * whole
    sizes = torch.tensor(E2M1)
    near = (some / scaled[:, :, None].clamp(min=1e-9)).abs()[..., None] - sizes
    codes = near.abs().argmin(-1) + 8 * (some < 0)
    values = torch.cat((sizes, -sizes))[codes]
    codes = codes.view(rows, cols)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
    return tensors, (values * scaled[:, :, None]).view(rows, cols)


def compressed(weight: torch.Tensor, format: str, **settings: Any) -> Written:
    """Written by compressed-tensors in its `format`, with the QuantizationArgs `settings`.

    Scales have the weight's dtype.
    """
    args = QuantizationArgs(**settings)
    rows, cols = weight.shape
    strategy, dtype = str(getattr(args.strategy, "value", args.strategy)), weight.dtype
    group = args.group_size or cols
    most = {("int", 4): 7.0, ("int", 8): 127.0, ("float", 8): 448.0, ("float", 4): 6.0}[
        (str(getattr(args.type, "value", args.type)), args.num_bits)
    ]
    state: dict[str, torch.Tensor] = {"weight": weight}
    if strategy == "block":
        high, wide = args.block_structure or (1, 1)
        padded = torch.nn.functional.pad(weight.float(), (0, -cols % wide, 0, -rows % high))
        blocks = padded.view(len(padded) // high, high, -1, wide)
        state["weight_scale"] = (blocks.abs().amax((1, 3)) / most).to(dtype)
    elif strategy == "tensor":
        state["weight_scale"] = (weight.float().abs().max().view(1) / most).to(dtype)
    elif strategy == "tensor_group":
        whole = 448 * 6 / weight.float().abs().max().view(1)
        scales = weight.float().view(rows, -1, 16).abs().amax(2) / 6 * whole
        state["weight_scale"] = scales.to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = whole
    else:
        some = weight.float().view(rows, -1, group)
        if args.symmetric:
            state["weight_scale"] = (some.abs().amax(2) / most).to(dtype)
        else:
            low, high = some.amin(2).clamp(max=0), some.amax(2).clamp(min=0)
            state["weight_scale"] = ((high - low) / (2 * most + 1)).to(dtype)
            zero = (-most - 1 - low / state["weight_scale"].float()).round()
            state["weight_zero_point"] = zero.clamp(-most - 1, most).to(torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)
    tensors = compressor.compress(state, scheme)
    if strategy == "tensor_group":
        return tensors, _nvfp4(tensors)
    exact = {name: t.float() if t.is_floating_point() and name != "weight" else t
             for name, t in tensors.items()}  # fmt: skip
    dense = compressor.decompress(exact, scheme)["weight"]
    return tensors, dense.float()


def _nvfp4(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """code * (scale * (1 / global scale)), as vLLM computes it."""
    packed, scales = tensors["weight_packed"], tensors["weight_scale"].float()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    sizes = torch.tensor(E2M1)
    values = torch.cat((sizes, -sizes))[codes].view(len(codes), -1, 16)
    factor = 1 / tensors["weight_global_scale"].float()
    return (values * (scales * factor)[:, :, None]).view(len(codes), -1)


def _int(bits: int, *, group: int | None = None, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}


def _float(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def _of_compressed(
    format: str, weights: Mapping[str, Any], **group: Any
) -> tuple[dict[str, Any], Callable[[torch.Tensor], Written]]:
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **group}},
        "ignore": ["lm_head"],
    }
    return config, lambda weight: compressed(weight, format, **weights)


def _of_gptq(**settings: Any) -> tuple[dict[str, Any], Callable[[torch.Tensor], Written]]:
    version, bits = settings.get("version", 1), settings.get("bits", 4)
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": settings.get("group", 32),
        "sym": settings.get("sym", True), "desc_act": False,
        "checkpoint_format": "gptq_v2" if version == 2 else "gptq",
    }  # fmt: skip
    return config, lambda weight: gptq(weight, **settings)


# Settings in config.json and a writer, by name.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written]]] = {
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        fp8,
    ),
    "fp8-small-block": ({"quant_method": "fp8", "weight_block_size": [24, 32]},
                        lambda weight: fp8(weight, block=(24, 32))),
    "fp8-tensor": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                   lambda weight: fp8(weight, block=None)),
    "ct-fp8-tensor": _of_compressed("float-quantized", _float("tensor")),
    "ct-fp8-channel": _of_compressed(
        "float-quantized", _float("channel"),
        input_activations={"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
    ),
    "ct-fp8-block": _of_compressed(
        "float-quantized", _float("block", block_structure=[128, 128])
    ),
    "ct-4bit": _of_compressed("pack-quantized", _int(4, group=32)),
    "ct-4bit-zeros": _of_compressed("pack-quantized", _int(4, group=32, symmetric=False)),
    "ct-4bit-channel": _of_compressed("pack-quantized", _int(4)),
    "ct-8bit": _of_compressed("pack-quantized", _int(8, group=64)),
    "ct-int8": _of_compressed("int-quantized", _int(8)),
    "ct-int8-zeros": _of_compressed("int-quantized", _int(8, symmetric=False)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq": _of_gptq(),
    "gptq-zeros": _of_gptq(sym=False),
    "gptq-v2": _of_gptq(sym=False, version=2),
    "gptq-8bit": _of_gptq(bits=8, sym=False),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
              modelopt_nvfp4),
    "ct-nvfp4": _of_compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
         "group_size": 16},
    ),
}  # fmt: skip


CONFIG = {
    "vocab_size": 331, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "initializer_range": 0.08, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save(
    directory: Path,
    settings: Mapping[str, Any],
    write: Callable[[torch.Tensor], Written],
    *,
    plain: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """Write a tiny model whose linear layers are quantised, but those whose names have a `plain`.

    It is a Llama if there is no `config`. Returns transformers' model of the weights that are
    stored, in float32.
    """
    torch.manual_seed(7)
    config = config or LlamaConfig(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # of norms
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    model = model.float()
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if not module.endswith(KINDS) or any(part in module for part in plain):
            continue
        written, dense = write(tensors.pop(name))
        tensors |= {f"{module}.{suffix}": each.contiguous() for suffix, each in written.items()}
        _put(model, module, dense)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    return model


def _put(model: PreTrainedModel, module: str, dense: torch.Tensor) -> None:
    """Let `dense` be the weight of a module, or of an expert's, which transformers stacks."""
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj", module)
    if not expert:
        model.get_submodule(module).weight.data = dense
        return
    experts, number = model.get_submodule(expert[1]), int(expert[2])
    if expert[3] == "down":
        experts.down_proj.data[number] = dense
        return
    gate, up = experts.gate_up_proj.data[number].chunk(2)
    (gate if expert[3] == "gate" else up).copy_(dense)
