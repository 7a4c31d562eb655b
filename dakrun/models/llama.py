"""Llama 2 and 3.x: RMSNorm, rotary embeddings, grouped heads, SiLU-gated feed-forward."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dakrun.config import ModelConfig
from dakrun.models.layers import Decoder, rms_norm, rope_table, stacked, vectors
from dakrun.weights.checkpoint import Manifest, Source, Weights
from dakrun.weights.folding import Fold


class Llama(Decoder):
    """LlamaForCausalLM over partitioned weights."""

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        super().__init__(config, weights)
        norm = weights.resident["norm"]
        cos, sin = rope_table(config, max_model_len, norm.dtype)
        self._cos, self._sin = cos.to(norm.device), sin.to(norm.device)

    @staticmethod
    def manifest(config: ModelConfig, has: Callable[[str], bool]) -> Manifest:
        """Hugging Face names, with or without "model."; q, k, v as `qkv`, gate, up as `gate_up`.

        A norm folds into the matrix behind it, but not the last into an embedding table.
        """
        c = config
        hidden, ffn, q, kv = c.hidden_size, c.ffn_size, c.q_size, c.kv_size
        bare = "embed_tokens.weight"
        root = "" if has(bare) and not has(f"model.{bare}") else "model."
        embedding = stacked((f"{root}embed_tokens.weight", c.vocab_size), cols=hidden)
        matrices: dict[str, tuple[Source, ...]] = {}
        resident = {"norm": vectors((f"{root}norm.weight", hidden))}
        folded = {} if c.tied_embeddings else {"lm_head": Fold("rms", "norm")}
        if c.tied_embeddings:
            matrices["lm_head"] = embedding
        else:
            matrices["embedding"] = embedding
            matrices["lm_head"] = stacked(("lm_head.weight", c.vocab_size), cols=hidden)
        for i in range(c.num_layers):
            name, hf = f"layers.{i}", f"{root}layers.{i}"
            fused = {
                "qkv": ([("q_proj", q), ("k_proj", kv), ("v_proj", kv)], "self_attn", hidden),
                "o": ([("o_proj", hidden)], "self_attn", q),
                "gate_up": ([("gate_proj", ffn), ("up_proj", ffn)], "mlp", hidden),
                "down": ([("down_proj", hidden)], "mlp", ffn),
            }
            for op, (parts, block, cols) in fused.items():
                names = [(f"{hf}.{block}.{part}", rows) for part, rows in parts]
                matrices[f"{name}.{op}"] = stacked(
                    *((f"{n}.weight", rows) for n, rows in names), cols=cols
                )
                if c.attention_bias if block == "self_attn" else c.mlp_bias:
                    resident[f"{name}.{op}.bias"] = vectors(
                        *((f"{n}.bias", rows) for n, rows in names)
                    )
            for norm, op in (("input_layernorm", "qkv"), ("post_attention_layernorm", "gate_up")):
                resident[f"{name}.{norm}"] = vectors((f"{hf}.{norm}.weight", hidden))
                folded[f"{name}.{op}"] = Fold("rms", f"{name}.{norm}")
        interleaved = frozenset(f"layers.{i}.gate_up" for i in range(c.num_layers))
        return Manifest(matrices, resident, folded, interleaved)

    def _hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        eps, vector = self.config.norm_eps, self.weights.resident
        rope = (self._cos[positions, None], self._sin[positions, None])
        x = self.embed(tokens)
        for i in range(self.config.num_layers):
            h = rms_norm(x, vector[f"layers.{i}.input_layernorm"], eps)
            qkv = self.linear("qkv", h, i)
            h = self.attention(qkv, lambda q, k, v, i=i: attend(i, q, k, v), rope)  # type: ignore[misc]
            x = x + self.linear("o", h, i)
            h = rms_norm(x, vector[f"layers.{i}.post_attention_layernorm"], eps)
            gate, up = self.linear("gate_up", h, i).chunk(2, dim=-1)
            x = x + self.linear("down", F.silu(gate) * up, i)
        return rms_norm(x, vector["norm"], eps)
