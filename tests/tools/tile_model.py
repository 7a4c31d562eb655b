"""Makes a wide checkpoint that computes what a small one computes: its hidden units, repeated.

    python tests/tools/tile_model.py SmolLM2-135M-Instruct SmolLM2-7B --times 8

A large model of random weights answers with noise, on which drafts, grammars and stop strings
cannot be tried. This one has the size and the speed of a large model, and the small model's
answers.

Every hidden unit, head and feed-forward unit is repeated `times` times, the whole vector after
itself (not each unit beside its copy, so that query heads keep their key heads). A weight matrix
[N, K] becomes times x times copies of itself divided by `times`: a product adds `times` equal sums.
The embedding is repeated only, and the last norm is divided by `times` in place of the output
matrix, which may be the embedding. Division by a power of two is exact in bfloat16, so logits
differ by the order of summation alone. Of Llama's layout: Llama, Mistral, Qwen2, Qwen3.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SHARD_BYTES = 2 << 30
TIMED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
HEAD_NORMS = ("q_norm.weight", "k_norm.weight")  # of one head, which stays as wide
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def tiled(name: str, tensor: torch.Tensor, times: int) -> torch.Tensor:
    """The tensor called `name` of the wide checkpoint, made of that of the small one."""
    if name.endswith(HEAD_NORMS):
        return tensor
    if name == "model.norm.weight":
        return tensor.repeat(times) / times
    if tensor.dim() == 1:
        return tensor.repeat(times)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return tensor.repeat(1, times)
    return (tensor / times).repeat(times, times)


def tile_model(source: Path, destination: Path, times: int) -> None:
    """Write the wide checkpoint, and copy the tokenizer's files. `times` is a power of two.

    Raises ValueError for other families and numbers.
    """
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] not in FAMILIES:
        raise ValueError(f"{config['model_type']} does not have Llama's layout")
    if times < 1 or times & (times - 1):
        raise ValueError(f"expected a power of two, got {times}")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config |= {key: config[key] * times for key in TIMED}
    destination.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".bin" and ".safetensors" not in file.suffixes:
            shutil.copy(file, destination)
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    places: dict[str, str] = {}
    for number, shard in enumerate(_shards(source, times)):
        name = f"model-{number:05}.safetensors"
        save_file(shard, destination / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": places}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(source: Path, times: int) -> Iterator[dict[str, torch.Tensor]]:
    """The wide tensors by name, in groups of about SHARD_BYTES."""
    shard: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shard[name] = tiled(name, tensors.get_tensor(name), times).contiguous()
                if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
                    yield shard
                    shard = {}
    if shard:
        yield shard


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a wide checkpoint of a small one.")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--times", type=int, default=8)
    options = parser.parse_args()
    tile_model(options.source, options.destination, options.times)
