"""OPT (arXiv 2205.01068): LayerNorms, learned positions, ReLU.

Only OPT-350m has norms behind its matrices, and word embeddings narrower than hidden states.
"""

from dakrun.config import ModelConfig
from dakrun.models.decoder import MLP, Decoder, Layer
from dakrun.models.modules import Attention, Embedding, Linear, Norm, vocabulary
from dakrun.models.operands import Operand, Scope

OFFSET = 2  # unused rows at the beginning of the table of positions


def opt(c: ModelConfig) -> Decoder:
    """The OPT model of `c`."""
    top, hidden = Scope("model.decoder."), c.hidden_size
    final = _norm(c, top, "final_norm", "final_layer_norm") if c.final_norm else None
    count = c.max_positions + OFFSET
    positions = Operand("positions", top.sources({"embed_positions": count}, "weight", hidden))
    layers = [_layer(c, i) for i in range(c.num_layers)]
    if c.embed_size == hidden:
        table, head = vocabulary(c, top, final)
        return Decoder(c, Embedding(table, None, positions, OFFSET), layers, head)
    table, head = vocabulary(c, top, None)
    project_in = Linear(top, "project_in", {"project_in": hidden}, c.embed_size)
    project_out = Linear(top, "project_out", {"project_out": c.embed_size}, hidden, norm=final)
    embedding = Embedding(table, project_in, positions, OFFSET)
    return Decoder(c, embedding, layers, head, project_out)


def _layer(c: ModelConfig, i: int) -> Layer:
    at, hidden = Scope(f"model.decoder.layers.{i}.", i), c.hidden_size
    norms = (
        _norm(c, at, "attention_norm", "self_attn_layer_norm"),
        _norm(c, at, "ffn_norm", "final_layer_norm"),
    )
    before, after = (norms, (None, None)) if c.pre_norm else ((None, None), norms)
    heads = {
        "self_attn.q_proj": c.q_size,
        "self_attn.k_proj": c.kv_size,
        "self_attn.v_proj": c.kv_size,
    }
    out = {"self_attn.out_proj": hidden}
    return Layer(
        Linear(at, "qkv", heads, hidden, bias=c.attention_bias, norm=before[0]),
        Attention(c, i, rotary=False),
        Linear(at, "o", out, c.q_size, bias=c.o_bias, adds=True, post_norm=after[0]),
        MLP(
            Linear(
                at, "fc1", {"fc1": c.ffn_size}, hidden, bias=c.mlp_bias, norm=before[1],
                activation="relu",
            ),
            Linear(
                at, "fc2", {"fc2": hidden}, c.ffn_size, bias=c.mlp_bias, adds=True,
                post_norm=after[1],
            ),
        ),
    )  # fmt: skip


def _norm(c: ModelConfig, at: Scope, name: str, module: str) -> Norm:
    return Norm("layer", at, name, module, c.hidden_size, affine=c.norm_affine)
