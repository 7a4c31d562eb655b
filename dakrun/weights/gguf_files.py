"""Conversion of a GGUF file, llama.cpp's format, to a checkpoint that Hugging Face's tools read.

Dequantizes tensor by tensor. Configuration and weights are translated here; the tokenizer and its
chat template are transformers' reading of the file. Knows GGUF's names of llama, qwen2 and qwen3.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from dakrun.config import DTYPE_BYTES, Dtype
from dakrun.errors import CannotRun, UsageError
from dakrun.weights.bins import brief
from dakrun.weights.convert import (
    SHARD_BYTES,
    Conversion,
    Progress,
    check_target,
    disk_errors,
    name_shards,
    staged,
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # by which the frequencies of RoPE are divided
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(
    source: Path,
    target: Path,
    *,
    dtype: Dtype = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
    note: Callable[[str], None] = lambda text: None,
) -> Conversion:
    """Write the GGUF file `source` as safetensors of `dtype` into the new folder `target`.

    config.json, tokenizer and chat template come from the file's metadata. A file of several parts
    is not read. `target` appears only when it is complete.

    Raises UsageError if `source` is no GGUF file or `target` is not empty; CannotRun if the gguf
    package is missing, the model's architecture or a tensor is not known, or the disk is too small.
    """
    file = _opened(source)
    config = _config(file, source, dtype)
    target = target.resolve()
    done = Progress()
    with disk_errors(target):
        nbytes = sum(int(tensor.n_elements) for tensor in file.tensors) * DTYPE_BYTES[dtype]
        check_target(target, nbytes)
        with staged(target) as folder:
            _write(file, source, folder, config, getattr(torch, dtype), shard_bytes, done, note)
            name_shards(folder, done)
            text = json.dumps(config, indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
            note("converting the tokenizer")
            _save_tokenizer(source, folder)
    return done.conversion(target)


def _opened(source: Path) -> Any:
    """gguf's reader of `source`."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CannotRun(
            "reading GGUF files needs the gguf package", hint="pip install 'dakrun[gguf]'"
        ) from None
    try:
        return GGUFReader(source)
    except OSError as problem:
        raise UsageError(
            f"{source}: {problem.strerror or problem}", hint="give a .gguf file"
        ) from None
    except (ValueError, IndexError, KeyError) as problem:
        raise UsageError(
            f"{source}: not a GGUF file, or damaged ({brief(problem)})",
            hint="download it again, and compare its size with the published one",
        ) from None


def _config(file: Any, source: Path, dtype: Dtype) -> dict[str, Any]:
    """config.json from the file's metadata."""

    def found(key: str, default: Any = None) -> Any:
        field = file.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise UsageError(
                f"{source}: its metadata has no {key}",
                hint="download the file again, or convert the model anew",
            )
        return default

    family = found("general.architecture")
    if family not in ARCHITECTURES:
        raise CannotRun(
            f"{source}: architecture {family} is not supported",
            hint=f"supported in GGUF files are {', '.join(ARCHITECTURES)}",
        )
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if EMBEDDING not in shapes or found("split.count", 1) > 1:
        raise CannotRun(
            f"{source}: is a part of a model",
            hint="join the parts into one file with llama-gguf-split --merge",
        )
    heads, hidden = found(f"{family}.attention.head_count"), found(f"{family}.embedding_length")
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": int(shapes[EMBEDDING][1]),
        "hidden_size": hidden,
        "intermediate_size": found(f"{family}.feed_forward_length"),
        "num_hidden_layers": found(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": found(f"{family}.attention.head_count_kv", heads),
        "head_dim": found(f"{family}.attention.key_length", hidden // heads),
        "max_position_embeddings": found(f"{family}.context_length"),
        # Stored in float32, of which the published decimal is the shortest.
        "rms_norm_eps": _decimal(found(f"{family}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(found(f"{family}.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": dtype,
    }
    if family != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    for kind in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if kind == 'pad' else kind}_token_id"
        if file.get_field(key) is not None:
            config[f"{kind}_token_id"] = found(key)
    scaling = found(f"{family}.rope.scaling.type", "none")
    if ROPE_FACTORS in shapes:
        factors = next(t.data for t in file.tensors if t.name == ROPE_FACTORS)
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": factors.tolist(),
            "long_factor": factors.tolist(),
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    elif scaling != "none":
        scaled = {"rope_type": scaling, "factor": found(f"{family}.rope.scaling.factor")}
        original = f"{family}.rope.scaling.original_context_length"
        if file.get_field(original) is not None:
            scaled["original_max_position_embeddings"] = found(original)
        config["rope_scaling"] = scaled
    return config


def _decimal(number: float) -> float:
    """The shortest decimal with the float32 value `number`."""
    return next(
        short for digits in range(1, 10)
        if torch.tensor(short := float(f"{number:.{digits}g}"), dtype=torch.float32).item()
        == torch.tensor(number, dtype=torch.float32).item()
    )  # fmt: skip


def _write(
    file: Any,
    source: Path,
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    shard_bytes: int,
    done: Progress,
    note: Callable[[str], None],
) -> None:
    """Write output files named 0, 1, ... of up to `shard_bytes`, or of one larger tensor."""
    group: dict[str, torch.Tensor] = {}

    def flush() -> None:
        note(f"writing file {len(done.shards) + 1}")
        path = folder / str(len(done.shards))
        safetensors.torch.save_file(group, path, metadata={"format": "pt"})
        done.shards.append(list(group))
        done.nbytes += sum(tensor.nbytes for tensor in group.values())
        group.clear()

    for name, tensor in _tensors(file, source, config):
        new = tensor.to(dtype)
        if group and sum(t.nbytes for t in group.values()) + new.nbytes > shard_bytes:
            flush()
        group[name] = new
    flush()


def _tensors(file: Any, source: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's name of each tensor, and its values in float32."""
    from gguf import dequantize

    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = _name(tensor.name)
        if name is None:
            raise CannotRun(
                f"{source}: tensor {tensor.name} is not known",
                hint="the model has parts that its architecture does not name; "
                "use its safetensors checkpoint",
            )
        try:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except (NotImplementedError, ValueError) as problem:
            kind = tensor.tensor_type.name
            raise CannotRun(
                f"{source}: tensor {tensor.name}, of type {kind}, cannot be dequantized "
                f"({brief(problem)})",
                hint="update the gguf package, or use another file of the model",
            ) from None
        if config["model_type"] == "llama" and ".attn_q." in tensor.name:
            values = _paired_in_halves(values, config["num_attention_heads"])
        if config["model_type"] == "llama" and ".attn_k." in tensor.name:
            values = _paired_in_halves(values, config["num_key_value_heads"])
        yield name, values


def _name(name: str) -> str | None:
    """Hugging Face's name of GGUF's tensor `name`; None if it is not known."""
    module, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
        of_layer = _OF_LAYER.get(layer[2])
        return of_layer and f"model.layers.{layer[1]}.{of_layer}.{kind}"
    return f"{_TOP[module]}.{kind}" if module in _TOP else None


def _paired_in_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as RoPE pairs them here: i and i + D / 2 of a head.

    GGUF files of llama have these rows side by side, at 2 i and 2 i + 1.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _save_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer and its chat template, as transformers reads them from `source`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    except Exception as problem:  # of many kinds, from files that are not ours
        raise CannotRun(
            f"{source}: its tokenizer cannot be converted ({brief(problem)})",
            hint="convert a file whose tokenizer transformers supports",
        ) from None
    tokenizer.save_pretrained(folder)
