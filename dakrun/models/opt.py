"""OPT, 125m to 66b: LayerNorm (after the block in 350m), learned positions, ReLU feed-forward."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dakrun.config import ModelConfig
from dakrun.models.layers import Decoder, layer_norm, stacked, vectors
from dakrun.weights.checkpoint import Manifest, Source, Weights
from dakrun.weights.folding import Fold

POSITION_OFFSET = 2


class Opt(Decoder):
    """OPTForCausalLM over partitioned weights."""

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        super().__init__(config, weights)

    @staticmethod
    def manifest(config: ModelConfig, has: Callable[[str], bool]) -> Manifest:
        """Hugging Face names, with or without the leading "model."; q, k, v stacked as `qkv`.

        A norm ahead of a matrix folds into it, but not the last into an embedding table.
        """
        c = config
        hidden, ffn = c.hidden_size, c.ffn_size
        bare = "decoder.embed_tokens.weight"
        root = "decoder" if has(bare) and not has(f"model.{bare}") else "model.decoder"
        embedding = stacked((f"{root}.embed_tokens.weight", c.vocab_size), cols=c.embed_size)
        positions = (f"{root}.embed_positions.weight", (c.max_positions + POSITION_OFFSET, hidden))
        matrices: dict[str, tuple[Source, ...]] = {}
        resident: dict[str, tuple[Source, ...]] = {"positions": (positions,)}
        if c.tied_embeddings:
            matrices["lm_head"] = embedding
        else:
            matrices["embedding"] = embedding
            matrices["lm_head"] = stacked(("lm_head.weight", c.vocab_size), cols=c.embed_size)
        if c.embed_size != hidden:
            matrices["project_in"] = stacked(
                (f"{root}.project_in.weight", hidden), cols=c.embed_size
            )
            matrices["project_out"] = stacked(
                (f"{root}.project_out.weight", c.embed_size), cols=hidden
            )
        norms = {"final_norm": f"{root}.final_layer_norm"} if c.final_norm else {}
        for i in range(c.num_layers):
            name, hf = f"layers.{i}", f"{root}.layers.{i}"
            norms[f"{name}.attention_norm"] = f"{hf}.self_attn_layer_norm"
            norms[f"{name}.ffn_norm"] = f"{hf}.final_layer_norm"
            fused = {
                "qkv": ([(f"self_attn.{p}_proj", hidden) for p in "qkv"], hidden, c.attention_bias),
                "o": ([("self_attn.out_proj", hidden)], hidden, c.attention_bias),
                "fc1": ([("fc1", ffn)], hidden, c.mlp_bias),
                "fc2": ([("fc2", hidden)], ffn, c.mlp_bias),
            }
            for op, (parts, cols, bias) in fused.items():
                matrices[f"{name}.{op}"] = stacked(
                    *((f"{hf}.{part}.weight", rows) for part, rows in parts), cols=cols
                )
                if bias:
                    resident[f"{name}.{op}.bias"] = vectors(
                        *((f"{hf}.{part}.bias", rows) for part, rows in parts)
                    )
        if c.norm_affine:
            for name, hf in norms.items():
                resident[f"{name}.weight"] = vectors((f"{hf}.weight", hidden))
                resident[f"{name}.bias"] = vectors((f"{hf}.bias", hidden))
        folded = {}
        if c.pre_norm:
            for i in range(c.num_layers):
                folded[f"layers.{i}.qkv"] = _fold(c, f"layers.{i}.attention_norm")
                folded[f"layers.{i}.fc1"] = _fold(c, f"layers.{i}.ffn_norm")
            if c.final_norm and not c.tied_embeddings and c.embed_size == hidden:
                folded["lm_head"] = _fold(c, "final_norm")
        return Manifest(matrices, resident, folded)

    def _hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        pre_norm, projected = self.config.pre_norm, "project_in" in self.weights.matrices
        x = self.embed(tokens)
        if projected:
            x = self.linear("project_in", x)
        x = x + self.weights.resident["positions"][positions + POSITION_OFFSET]
        for i in range(self.config.num_layers):
            h = self._norm(f"layers.{i}.attention_norm", x) if pre_norm else x
            qkv = self.linear("qkv", h, i)
            h = self.attention(qkv, lambda q, k, v, i=i: attend(i, q, k, v), None)  # type: ignore[misc]
            x = x + self.linear("o", h, i)
            x = x if pre_norm else self._norm(f"layers.{i}.attention_norm", x)
            h = self._norm(f"layers.{i}.ffn_norm", x) if pre_norm else x
            x = x + self.linear("fc2", F.relu(self.linear("fc1", h, i)), i)
            x = x if pre_norm else self._norm(f"layers.{i}.ffn_norm", x)
        if self.config.final_norm:
            x = self._norm("final_norm", x)
        return self.linear("project_out", x) if projected else x

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        vector = self.weights.resident
        return layer_norm(x, vector.get(f"{name}.weight"), vector.get(f"{name}.bias"))


def _fold(config: ModelConfig, norm: str) -> Fold:
    return Fold("layer", f"{norm}.weight", f"{norm}.bias") if config.norm_affine else Fold("layer")
