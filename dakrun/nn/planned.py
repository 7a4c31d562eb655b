"""The ratios of a plan for the modules of a model of transformers, for replace_linears(plan=).

Finds modules by name: transformers names a module as checkpoints name its tensors.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from dakrun.hardware import LOCAL
from dakrun.memory.tiers import HOST
from dakrun.models.families import decoder_of
from dakrun.models.modules import Linear
from dakrun.plan import Plan


def planned_options(model: nn.Module, plan: Plan) -> dict[str, dict[str, Any]]:
    """Options of SplitKGEMM for each Linear of `model` that `plan` places, by its name in `model`.

    A matrix of the plan may stack several modules, such as q_proj, k_proj and v_proj: they have the
    matrix's ratio in their layer. Raises ValueError if the plan has several remote tiers, or is of
    another model, where a module is missing or has another shape.
    """
    if len(plan.tiers) > 2:
        raise ValueError(
            f"expected a plan with one remote tier, got {', '.join(plan.tiers[1:])}: a SplitKGEMM "
            "has one; plan with --remote host, or another single tier"
        )
    remote = plan.tiers[1] if len(plan.tiers) == 2 else HOST
    modules = {name.removeprefix("model."): name for name, _ in model.named_modules()}
    options = {}
    for planned, shape, ratio in _planned(plan):
        name = modules.get(planned.removeprefix("model."))
        module = None if name is None else model.get_submodule(name)
        if name is None or not isinstance(module, nn.Linear):
            raise ValueError(
                f"expected the model of the plan, {plan.model.name}, with an nn.Linear {planned}; "
                f"got {'none' if module is None else type(module).__name__}"
            )
        if tuple(module.weight.shape) != shape:
            raise ValueError(
                f"expected the model of the plan, {plan.model.name}: {name} is "
                f"{list(module.weight.shape)}, and {list(shape)} in the plan"
            )
        options[name] = {"ratio": ratio, "remote": remote, "profile": plan.profile}
    return options


def _planned(plan: Plan) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and offload ratio of each Linear of the plan's model.

    A tied lm_head is left out, since it shares the weight of the embeddings.
    """
    for op, matrices in decoder_of(plan.model).ops.items():
        tied = op == "lm_head" and plan.model.tied_embeddings
        for layer, matrix in enumerate(() if tied else matrices):
            if isinstance(matrix, Linear):
                units = dict(plan.placement(op, layer))
                ratio = 1 - units[LOCAL] / sum(units.values())
                for source in matrix.sources:
                    yield source.name.removesuffix(".weight"), source.shape, ratio
