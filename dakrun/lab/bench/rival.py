"""The time of transformers' decode step, with the same architecture.

Weights are random, the cache is static and in HBM, and a step is one CUDA graph. Knows no plans.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)

from dakrun.config import LinearRope, Llama3Rope, LongRope, MixtureConfig, ModelConfig, YarnRope
from dakrun.errors import CannotRun
from dakrun.lab.bench.on_demand import built as on_demand_experts
from dakrun.lab.bench.prefetch import built
from dakrun.lab.probe.chain import graph_seconds
from dakrun.units import ceil_div

ALIGNMENT = 8  # positions: torch's attention needs mask rows aligned to 16 bytes


@dataclass(frozen=True)
class RivalStep:
    """Seconds of a decode step with `ratio` of the weight bytes in host memory."""

    seconds: float
    ratio: float


def rival_step(
    config: ModelConfig,
    *,
    ratio: float = 0.0,
    on_demand: bool = False,
    batch_size: int,
    prompt_len: int,
    new_tokens: int,
    device: torch.device,
) -> RivalStep:
    """The median of as many decode steps on `device` as `new_tokens` allow.

    As many whole layers as `ratio` of the weight bytes needs are in host memory (see prefetch.py),
    or, if `on_demand`, as many experts (see on_demand.py): such a step waits for the CPU, so that
    it is no graph. Raises CannotRun if transformers has no such model or host memory is short, and
    torch.OutOfMemoryError if the model does not fit the GPU.
    """
    runs = max(2, (new_tokens - 2) // 3)  # graph_seconds() runs up to 3 x runs + 2 steps
    room = prompt_len + max(new_tokens, 3 * runs + 2)
    whole = meta_model(config)
    if on_demand:
        place = on_demand_experts(whole, config, ratio, device, batch_size)
    else:
        place = built(whole, ratio, device)
    with torch.device(device), torch.inference_mode(), place as (model, found):
        prompt = torch.randint(config.vocab_size, (batch_size, prompt_len))
        step = Step(model, prompt, room)
        times = _eager_seconds(step, runs, device) if on_demand else graph_seconds(step, runs)
    return RivalStep(statistics.median(times), found)


def _eager_seconds(step: "Step", runs: int, device: torch.device) -> list[float]:
    """Seconds of each of `runs` steps, after as many to warm up."""
    found = []
    for _ in range(2 * runs):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return found[runs:]


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


class Step:
    """Decode steps of a transformers `model`; each writes the next tokens to `token`, int64 [n, 1].

    The constructor prefills `prompt`, int64 [n, P]. The cache has `room` positions.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, room: int) -> None:
        room = ceil_div(room, ALIGNMENT) * ALIGNMENT
        self._model = model
        self._cache = StaticCache(model.config, max_cache_len=room)
        self._slots = torch.arange(room, device=prompt.device)
        self._position = torch.full((1, 1), prompt.shape[1], device=prompt.device)
        self.token = self._next(prompt)

    def __call__(self) -> None:
        """Launch a step without synchronizing, so that a CUDA graph can capture it."""
        batch = self.token.shape[0]
        # Given explicitly: transformers would read the cache's length from the device.
        seen = (self._slots <= self._position).view(1, 1, 1, -1).expand(batch, -1, -1, -1)
        positions = self._position.expand(batch, 1)
        self.token.copy_(self._next(self.token, attention_mask=seen, position_ids=positions))
        self._position.add_(1)

    def _next(self, ids: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
        """The most likely next tokens after `ids`: int64 [n, 1]."""
        output = self._model(ids, past_key_values=self._cache, logits_to_keep=1, **positions)
        tokens: torch.Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        return tokens


def transformers_config(config: ModelConfig) -> PreTrainedConfig:
    """The configuration of the same architecture in transformers."""
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "dtype": config.dtype,
    }
    if config.family == "opt":
        return OPTConfig(
            ffn_dim=config.ffn_size,
            word_embed_proj_dim=config.embed_size,
            do_layer_norm_before=config.pre_norm,
            _remove_final_layer_norm=config.pre_norm and not config.final_norm,
            layer_norm_elementwise_affine=config.norm_affine,
            enable_bias=config.attention_bias,
            **common,
        )
    rope = {"rope_theta": config.rope_theta, **_rope(config)}
    if config.family != "phi3":
        common["head_dim"] = config.head_dim
    if config.family in ("llama", "qwen3"):
        common["attention_bias"] = config.attention_bias
    if config.family == "llama":
        common["mlp_bias"] = config.mlp_bias
    if config.family in ("mistral", "phi3"):
        common["sliding_window"] = None
    if config.family == "phi3":
        common["pad_token_id"] = None
    kinds: dict[str, type[PreTrainedConfig]] = {
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "phi3": Phi3Config,
        "qwen3_moe": Qwen3MoeConfig,
        "mixtral": MixtralConfig,
        "olmoe": OlmoeConfig,
        "glm4_moe": Glm4MoeConfig,
    }
    if config.mixture:
        common |= _experts(config, config.mixture)
    return kinds[config.family](
        num_key_value_heads=config.num_kv_heads,
        rope_parameters=rope,
        **{"intermediate_size": config.ffn_size, **common},
        rms_norm_eps=config.norm_eps,
    )


def _experts(config: ModelConfig, mixture: MixtureConfig) -> dict[str, Any]:
    """What transformers' configuration says of experts, in the keys of the family."""
    routing, dense = mixture.routing, list(mixture.dense_layers)
    common = {"num_experts_per_tok": routing.top_k, "norm_topk_prob": routing.renormalized}
    match config.family:
        case "mixtral":
            return {
                "num_local_experts": routing.experts,
                "num_experts_per_tok": routing.top_k,
                "intermediate_size": mixture.ffn_size,
            }
        case "olmoe":
            return {
                "num_experts": routing.experts,
                "intermediate_size": mixture.ffn_size,
                "attention_bias": config.attention_bias,
                **common,
            }
        case "qwen3_moe":
            return {
                "num_experts": routing.experts,
                "moe_intermediate_size": mixture.ffn_size,
                "mlp_only_layers": dense,
                "attention_bias": config.attention_bias,
                **common,
            }
    return {
        "n_routed_experts": routing.experts,
        "n_shared_experts": mixture.shared_size // mixture.ffn_size,
        "moe_intermediate_size": mixture.ffn_size,
        "first_k_dense_replace": len(dense),
        "n_group": routing.groups,
        "topk_group": routing.top_groups,
        "routed_scaling_factor": routing.scale,
        "partial_rotary_factor": config.rotary_factor,
        "use_qk_norm": config.head_norms,
        "attention_bias": config.attention_bias,
        **common,
    }


def _rope(config: ModelConfig) -> dict[str, object]:
    """The scaling of RoPE as transformers writes it."""
    match config.rope_scaling:
        case Llama3Rope() as s:
            return {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_positions,
            }
        case LinearRope() as s:
            return {"rope_type": "linear", "factor": s.factor}
        case YarnRope() as s:
            return {
                "rope_type": "yarn",
                "factor": s.factor,
                "attention_factor": s.attention_factor,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
                "truncate": s.truncate,
                "original_max_position_embeddings": s.original_max_positions,
            }
        case LongRope() as s:
            return {
                "rope_type": "longrope",
                "factor": 1.0,
                "attention_factor": s.attention_factor,
                "short_factor": list(s.factors),
                "long_factor": list(s.factors),
                "original_max_position_embeddings": config.max_positions,
            }
    return {"rope_type": "default"}
