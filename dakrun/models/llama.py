"""Llama (arXiv 2302.13971) and its like: RMSNorms, rotary positions, a gated feed-forward.

Mistral and Qwen2 differ in their config.json alone; qwen3.py and phi3.py are variations.
"""

from collections.abc import Callable, Mapping, Sequence

from dakrun.config import ModelConfig
from dakrun.models.decoder import MLP, Decoder, FeedForward, Layer
from dakrun.models.modules import Attention, Embedding, Linear, Norm, vocabulary
from dakrun.models.operands import HeadOrder, Scope


def gated(c: ModelConfig, at: Scope, modules: Mapping[str, int] | None = None) -> MLP:
    """The feed-forward down(silu(gate(x)) * up(x)); `modules`: gate and up, or one with both."""
    up = modules or {"mlp.gate_proj": c.ffn_size, "mlp.up_proj": c.ffn_size}
    norm = Norm("rms", at, "ffn_norm", "post_attention_layernorm", c.hidden_size)
    down, bias = {"mlp.down_proj": c.hidden_size}, c.mlp_bias
    return MLP(
        Linear(at, "gate_up", up, c.hidden_size, bias=bias, norm=norm, activation="silu_mul"),
        Linear(at, "down", down, c.ffn_size, bias=bias, adds=True),
    )


def llama(
    c: ModelConfig,
    *,
    qkv: Mapping[str, int] | None = None,
    head_norms: Sequence[int] = (),
    feed_forward: Callable[[ModelConfig, Scope], FeedForward] = gated,
) -> Decoder:
    """The model of `c`.

    `qkv` has the rows of the modules of queries, keys and values by name. `head_norms` has the
    sizes of the RMSNorms of queries and of keys: of a head, or of all heads, if there are norms.
    `feed_forward` makes the feed-forward of a layer.
    """
    top, hidden = Scope("model."), c.hidden_size
    heads = qkv or {
        "self_attn.q_proj": c.q_size,
        "self_attn.k_proj": c.kv_size,
        "self_attn.v_proj": c.kv_size,
    }

    def layer(i: int) -> Layer:
        at = Scope(f"model.layers.{i}.", i)
        norm = Norm("rms", at, "attention_norm", "input_layernorm", hidden)
        norms = [
            Norm("rms", at, f"{x}_norm", f"self_attn.{x}_norm", size)
            for x, size in zip("qk", head_norms, strict=False)
        ]
        joined = Linear(at, "qkv", heads, hidden, bias=c.attention_bias, norm=norm)
        if c.rotary_dim < c.head_dim:
            of_heads = [joined, joined.bias, *(norm.weight for norm in norms)]
            for operand in filter(None, of_heads):
                rows = min(operand.shape[0], c.q_size + c.kv_size)
                operand.heads = HeadOrder(rows, c.head_dim, c.rotary_dim)
        return Layer(
            joined,
            Attention(c, i, rotary=True, norms=norms),
            Linear(at, "o", {"self_attn.o_proj": hidden}, c.q_size, bias=c.o_bias, adds=True),
            feed_forward(c, at),
        )

    table, head = vocabulary(c, top, Norm("rms", top, "final_norm", "norm", hidden))
    return Decoder(c, Embedding(table), [layer(i) for i in range(c.num_layers)], head)
