"""transformers' model of the same architecture as one of dakrun's, with random weights."""

from dataclasses import asdict, fields

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dakrun.config import LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope
from dakrun.errors import CannotRun

ROPES = {Llama3Rope: "llama3", LinearRope: "linear", YarnRope: "yarn", LongRope: "longrope"}


def meta_model(config: ModelConfig) -> PreTrainedModel:
    """transformers' model of that architecture on the meta device; CannotRun if it has none."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                transformers_config(config), dtype=getattr(torch, config.dtype)
            ).eval()
    except Exception as problem:  # checks of several libraries, each with its own class
        reason = str(problem).strip().rpartition("\n")[2].strip()
        raise CannotRun(
            f"transformers cannot build {config.name}: {reason}", hint="leave out --rival"
        ) from None


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The layers of transformers' `model`."""
    layers: torch.nn.ModuleList = model.get_decoder().layers
    return layers


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def materialise(module: torch.nn.Module, model: PreTrainedModel, device: torch.device) -> None:
    """Give what is on the meta device in `module`, a part of `model`, memory and random values."""
    for part in module.modules():
        own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            part.to_empty(device=device, recurse=False)
            model._init_weights(part)


def transformers_config(config: ModelConfig) -> PreTrainedConfig:
    """The configuration of the same architecture in transformers.

    Families have different keys for the same figure: each takes those that its class has.
    """
    kind = CONFIG_MAPPING[config.family]
    keys = {of.name for of in fields(kind)}
    keys |= set() if config.family in ("opt", "phi3") else {"head_dim", "partial_rotary_factor"}
    known = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "dtype": config.dtype,
        "intermediate_size": config.ffn_size,
        "ffn_dim": config.ffn_size,
        "word_embed_proj_dim": config.embed_size,
        "do_layer_norm_before": config.pre_norm,
        "_remove_final_layer_norm": config.pre_norm and not config.final_norm,
        "layer_norm_elementwise_affine": config.norm_affine,
        "enable_bias": config.attention_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **_rope(config)},
        "partial_rotary_factor": config.rotary_factor,
        "use_qk_norm": config.head_norms,
        "mlp_only_layers": list(range(config.num_layers)),  # unless a mixture
        "first_k_dense_replace": config.num_layers,
    }
    if mixture := config.mixture:
        routing, dense = mixture.routing, list(mixture.dense_layers)
        known |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"),
                               routing.experts)  # fmt: skip
        known |= {
            "num_experts_per_tok": routing.top_k,
            "norm_topk_prob": routing.renormalized,
            "moe_intermediate_size": mixture.ffn_size,
            "mlp_only_layers": dense,
            "n_shared_experts": mixture.shared_size // mixture.ffn_size,
            "first_k_dense_replace": len(dense),
            "n_group": routing.groups,
            "topk_group": routing.top_groups,
            "routed_scaling_factor": routing.scale,
        }
        if "moe_intermediate_size" not in keys:
            known["intermediate_size"] = mixture.ffn_size
    if config.family == "phi3":
        known["pad_token_id"] = None
    return kind(**{key: value for key, value in known.items() if key in keys})


def _rope(config: ModelConfig) -> dict[str, object]:
    """The scaling of RoPE as transformers writes it, which has most keys from there."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    found = {"rope_type": ROPES[type(scaling)], "factor": 1.0, **asdict(scaling)}
    if isinstance(scaling, LongRope):
        factors = list(found.pop("factors"))
        found |= {"short_factor": factors, "long_factor": factors}
        found["original_max_positions"] = config.max_positions
    if "original_max_positions" in found:
        found["original_max_position_embeddings"] = found.pop("original_max_positions")
    return found
