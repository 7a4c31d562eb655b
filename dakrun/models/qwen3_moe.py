"""Qwen3 with experts (arXiv 2505.09388), and what OLMoE and GLM-4.5 share with it."""

from dakrun.config import ModelConfig
from dakrun.models.decoder import MLP, Decoder, FeedForward
from dakrun.models.experts import Experts, Mixture, Router
from dakrun.models.llama import gated, llama
from dakrun.models.modules import Linear, Norm
from dakrun.models.operands import Scope


def qwen3_moe(c: ModelConfig) -> Decoder:
    """The Qwen3-MoE model of `c`."""
    return llama(c, head_norms=(c.head_dim, c.head_dim), feed_forward=mixture)


def mixture(
    c: ModelConfig,
    at: Scope,
    *,
    block: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> FeedForward:
    """The feed-forward of a layer: of experts, or a single one in a dense layer.

    The names are those of modules of the checkpoint; transformers' own are the defaults.
    """
    m, hidden = c.mixture, c.hidden_size
    if m is None or at.layer in m.dense_layers:
        return gated(c, at)
    assert at.layer is not None, "experts are in layers"
    order = m.order(at.layer)
    norm = Norm("rms", at, "ffn_norm", "post_attention_layernorm", hidden)
    router = Router(at, f"{block}.gate", m.routing, hidden, order=order, joined="mlp.gate.weight")
    experts, shared = f"{block}.experts.{{}}.", f"{block}.shared_experts."
    return Mixture(
        router,
        Experts(
            at, "experts_gate_up", {experts + name: m.ffn_size for name in (gate, up)}, hidden,
            mixture=m, order=order, joined="mlp.experts.gate_up_proj", gated=True, norm=norm,
            beside=[*router.vectors()],
        ),
        Experts(
            at, "experts_down", {experts + down: hidden}, m.ffn_size, mixture=m, order=order,
            joined="mlp.experts.down_proj",
        ),
        MLP(
            Linear(
                at, "shared_gate_up", {shared + name: m.shared_size for name in (gate, up)}, hidden,
                norm=norm, activation="silu_mul",
            ),
            Linear(at, "shared_down", {shared + down: hidden}, m.shared_size, adds=True),
        ) if m.shared_size else None,
    )  # fmt: skip
