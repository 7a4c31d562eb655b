"""What a config.json says of experts, in the keys of each family that has them."""

from dakrun.config import FamilyName, MixtureConfig, Routing
from dakrun.errors import CannotRun
from dakrun.models.hf_fields import Fields

_EXPERTS = ("num_experts", "num_local_experts")  # the second since transformers 5


def mixture_of(fields: Fields, family: FamilyName, name: str) -> MixtureConfig | None:
    """The experts of the model `name`; None if no layer has experts. Raises as the fields do."""
    found = _of_family(fields, family, name)
    if found and len(found.dense_layers) >= fields.count("num_hidden_layers"):
        return None
    return found


def _of_family(fields: Fields, family: FamilyName, name: str) -> MixtureConfig | None:
    match family:
        case "mixtral":
            routing = Routing(
                experts=fields.count("num_local_experts", 8),
                top_k=fields.count("num_experts_per_tok", 2),
            )
            return MixtureConfig(routing=routing, ffn_size=fields.count("intermediate_size"))
        case "olmoe":
            if fields.has("clip_qkv"):
                raise CannotRun(
                    f"{name}: OLMoE with clip_qkv is not supported",
                    hint="published OLMoE models have null there",
                )
            routing = _softmax(fields, 64)
            return MixtureConfig(routing=routing, ffn_size=fields.count("intermediate_size"))
        case "qwen3_moe":
            return MixtureConfig(
                routing=_softmax(fields, 128),
                ffn_size=fields.count("moe_intermediate_size", 768),
                dense_layers=_dense_layers(fields),
            )
        case "glm4_moe":
            return _glm(fields)
    return None


def extra_layers(fields: Fields, family: FamilyName) -> int:
    """Layers of a checkpoint behind the model's last, which predict further tokens."""
    if family != "glm4_moe":
        return 0
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    key = next((key for key in keys if fields.has(key)), None)
    if key is None:
        return 1
    return 0 if fields.raw[key] == 0 else fields.count(key)


def _softmax(fields: Fields, experts: int) -> Routing:
    """Routing of Qwen3-MoE and OLMoE; `experts` is the default of their number."""
    return Routing(
        experts=fields.count(_EXPERTS[fields.has(_EXPERTS[1])], experts),
        top_k=fields.count("num_experts_per_tok", 8),
        renormalized=fields.flag("norm_topk_prob", False),
    )


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Qwen3-MoE's layers without experts."""
    key = "mlp_only_layers"
    listed = fields.raw.get(key) or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        fields.refuse(key, listed, "a list of layers")
    step = fields.count("decoder_sparse_step", 1)
    layers = range(fields.count("num_hidden_layers"))
    return tuple(i for i in layers if (i + 1) % step or i in listed)


def _glm(fields: Fields) -> MixtureConfig:
    routing = Routing(
        experts=fields.count("n_routed_experts", 128),
        top_k=fields.count("num_experts_per_tok", 8),
        scores="sigmoid",
        renormalized=fields.flag("norm_topk_prob", True),
        biased=True,
        groups=fields.count("n_group", 1),
        top_groups=fields.count("topk_group", 1),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    ffn = fields.count("moe_intermediate_size", 1408)
    dense = fields.raw.get("first_k_dense_replace") != 0
    return MixtureConfig(
        routing=routing,
        ffn_size=ffn,
        shared_size=ffn * fields.count("n_shared_experts", 1),
        dense_layers=tuple(range(fields.count("first_k_dense_replace", 1) if dense else 0)),
    )
