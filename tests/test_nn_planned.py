"""replace_linears with a plan: each Linear has the ratio of its op and layer."""

import copy

import pytest
import torch
from tiny_models import CONFIGS, reference
from torch import nn

from dakrun.config import Workload
from dakrun.geometry import row_block_count
from dakrun.hardware import load_profile
from dakrun.models.hf_config import parse_model_config
from dakrun.nn import SplitKGEMM, replace_linears
from dakrun.plan import Plan, Policy, make_plan

FUSED = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv", "out_proj": "o",
    "o_proj": "o", "gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up",
    "down_proj": "down", "fc1": "fc1", "fc2": "fc2", "lm_head": "lm_head",
}  # fmt: skip


def plan_of(name: str, *remote: str, **policy: float) -> Plan:
    """A plan with ratios that differ by op and layer."""
    raw = CONFIGS[name].to_dict() | {"architectures": None, "torch_dtype": "float32"}
    model = parse_model_config(raw, name=name).with_dtype("float32")
    workload = Workload(batch_size=8, prompt_len=64, new_tokens=16, max_model_len=80)
    profile = load_profile("h200-nvlink-peer")
    return make_plan(model, workload, profile, Policy(remote=remote or ("host",), **policy))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["opt-like-125m", "opt-like-350m", "llama-mha", "llama-gqa3-tied", "qwen3-linear",
     "phi3-longrope", "glm4-moe"],
)  # fmt: skip
def test_each_linear_has_the_ratio_of_its_op(name: str) -> None:
    model = copy.deepcopy(reference(name))
    ids = torch.arange(24).view(2, 12)
    plan = plan_of(name, offload_ratio=0.35, kv_offload_ratio=0.0)
    with torch.inference_mode():
        wanted = model(ids).logits
        replaced = replace_linears(model, plan=plan)
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-3, atol=1e-3)
    found = set()
    for label, module in replaced.items():
        part = label.rpartition(".")[2]
        op = FUSED.get(part)
        if op is None or (of := plan.op(op)).op.layers != plan.model.num_layers:
            continue
        layer = next((int(p) for p in label.split(".") if p.isdigit()), 0)
        local, remote = of.placement[layer]
        count = row_block_count(module.out_features)
        assert abs(module.ratio - remote / (local + remote)) <= 1 / count
        assert module.remote == "host" and (module.ratio > 0 or remote * count < local + remote)
        found.add((op, layer))
    if name != "glm4-moe":
        linears = [op for op in plan.ops if op.op.category == "linear" and op.op.in_layer]
        assert found >= {(of.op.name, n) for of in linears for n in range(of.op.layers)}
    assert type(model.get_output_embeddings()) is (
        nn.Linear if plan.model.tied_embeddings else SplitKGEMM
    )
    for module in replaced.values():
        module.close()


def test_a_plan_without_remote_bytes_moves_nothing() -> None:
    model = copy.deepcopy(reference("llama-mha"))
    plan = plan_of("llama-mha", offload_ratio=0.0, kv_offload_ratio=0.0)
    replaced = replace_linears(model, plan=plan)
    assert len(replaced) == 1 + 7 * plan.model.num_layers
    assert all(module.ratio == 0 for module in replaced.values())


def test_what_a_plan_does_not_name_is_kept() -> None:
    model = copy.deepcopy(reference("llama-mha"))
    model.adapter = nn.Linear(4, 4)
    assert "adapter" not in replace_linears(model, plan=plan_of("llama-mha"))
    assert type(model.adapter) is nn.Linear


def test_plans_that_do_not_fit_are_refused() -> None:
    model = copy.deepcopy(reference("llama-mha"))
    for plan, message in (
        (
            plan_of("llama-mha", "host", "peer"),
            "one remote tier, got host, peer:1: .* --remote",
        ),
        (plan_of("llama-gqa3-tied"), r"q_proj is|k_proj is \[.*\], and \[.*\] in the plan"),
        (plan_of("opt-like-125m"), "of the plan, opt-like-125m, with an nn.Linear .*; got none"),
    ):
        with pytest.raises(ValueError, match=message):
            replace_linears(model, plan=plan)
    with pytest.raises(ValueError, match="expected a plan or ratio, got both"):
        replace_linears(model, plan=plan_of("llama-mha"), ratio=0.5)
    assert not any(isinstance(module, SplitKGEMM) for module in model.modules())
