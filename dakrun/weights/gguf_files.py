"""Conversion of a GGUF file, llama.cpp's format, to a checkpoint that Hugging Face's tools read.

Dequantizes tensor by tensor. Configuration and weights are translated here; the tokenizer and its
chat template are transformers' reading of the file. Knows GGUF's names of llama, qwen2 and qwen3.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from dakrun.weights.gguf_metadata import ROPE_FACTORS, Metadata, model_config

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
    metadata = Metadata(file, source)
    config, generation = model_config(metadata, dtype), metadata.generation_config()
    target = target.resolve()
    done = Progress()
    with disk_errors(target):
        nbytes = sum(int(tensor.n_elements) for tensor in file.tensors) * DTYPE_BYTES[dtype]
        check_target(target, nbytes)
        with staged(target) as folder:
            _write(file, source, folder, config, getattr(torch, dtype), shard_bytes, done, note)
            name_shards(folder, done)
            for name, values in (("config", config), ("generation_config", generation)):
                text = json.dumps(values, indent=2) + "\n"
                (folder / f"{name}.json").write_text(text, encoding="utf-8")
            note("converting the tokenizer")
            _save_tokenizer(metadata, folder)
    return replace(done.conversion(target), unread=tuple(metadata.unread()))


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


def _save_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write the tokenizer and its chat template, as transformers reads them from the file.

    BOS and EOS around a text, and whole words before merges, are as in llama.cpp.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    source = metadata.source
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        ids = metadata.token_ids()
        names = {kind: tokenizer.convert_ids_to_tokens(token) for kind, token in ids.items()}
        for kind, name in names.items():
            if getattr(tokenizer, f"{kind}_token") is None:
                setattr(tokenizer, f"{kind}_token", name)
        first = [names["bos"]] if metadata.begins and "bos" in names else []
        last = [names["eos"]] if metadata.ends and "eos" in names else []
        backend = tokenizer.backend_tokenizer
        backend.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{name}:1" for name in first), "$B:1"]
            + [f"{name}:1" for name in last],
            special_tokens=[(names[kind], ids[kind]) for kind in ("bos", "eos") if kind in names],
        )
        if metadata.keeps_whole_words:
            backend.model.ignore_merges = True
        tokenizer.save_pretrained(folder)
    except Exception as problem:  # of many kinds, from files that are not ours
        raise CannotRun(
            f"{source}: its tokenizer cannot be converted ({brief(problem)})",
            hint="convert a file whose tokenizer transformers supports",
        ) from None
