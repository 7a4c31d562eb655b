"""SplitKGEMM instead of every nn.Linear of a model, with the ratios of a plan if one is given."""

import warnings
from collections import Counter
from typing import Any

from torch import nn

from dakrun.nn.gemm import SplitKGEMM
from dakrun.nn.planned import planned_options
from dakrun.plan import Plan


def replace_linears(
    model: nn.Module, *, plan: Plan | None = None, **options: Any
) -> dict[str, SplitKGEMM]:
    """Replace every nn.Linear in `model` by SplitKGEMM.from_linear(linear, **options).

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU())
    >>> replace_linears(model, ratio=0.5)
    {'0': SplitKGEMM(in_features=16, out_features=32, bias=True, ratio=0.5, remote=host)}

    With a `plan` (dakrun.plan.make_plan) for a model of transformers, each Linear has the ratio of
    its op and layer in the plan, and the plan's remote tier and profile. Linears that the plan does
    not place, such as routers, are kept. Remote parts are read in place even where the plan stages
    them.

    Returns the new modules by name. Modules are replaced one at a time, each freeing its old
    weight. A new module has its Linear's `training` and further attributes.

    Kept are a Linear that shares its weight with another module, such as a tied lm_head; subclasses
    of nn.Linear, which may compute something else; and, named in a warning, a Linear with hooks,
    with a method of its own (such as a `forward` patched by accelerate), or with further
    parameters, buffers or modules. Raises ValueError if `model` is itself an nn.Linear, and for a
    plan of another model, with several remote tiers, or beside an option that it decides.
    """
    if type(model) is nn.Linear:
        raise ValueError(
            "expected a model that contains nn.Linear, got an nn.Linear, which cannot be replaced "
            "in place; use SplitKGEMM.from_linear(linear, ...) and put the result in its place"
        )
    if plan is not None and not isinstance(plan, Plan):
        raise ValueError(f"expected a plan of dakrun.plan.make_plan, got {plan!r}")
    by_name = None if plan is None else planned_options(model, plan)
    if clash := sorted(options.keys() & {"ratio", "remote", "profile"}) if plan else []:
        raise ValueError(f"expected a plan or {', '.join(clash)}, got both")
    owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and owners[id(module.weight)] <= 1
        and (by_name is None or name in by_name)
    }
    kept = {name: reason for name, linear in linears.items() if (reason := _why_kept(linear))}
    replaced = {}
    for name in [name for name in linears if name not in kept]:
        linear = linears.pop(name)
        own = by_name[name] if by_name is not None else {}
        replaced[name] = SplitKGEMM.from_linear(linear, **own, **options)
        for attribute in _further_attributes(linear):
            setattr(replaced[name], attribute, getattr(linear, attribute))
        model.set_submodule(name, replaced[name])
    if kept:
        listed = ", ".join(f"{name} ({reason})" for name, reason in kept.items())
        warnings.warn(f"replace_linears keeps {len(kept)} nn.Linear: {listed}", stacklevel=2)
    return replaced


_PLAIN = frozenset(vars(nn.Linear(1, 1, device="meta")))  # the attributes of each nn.Linear
_OF_TIERS = frozenset(("ratio", "remote", "pdl", "_device", "_access", "_tiers", "_weight"))


def _further_attributes(linear: nn.Linear) -> list[str]:
    """Attributes that somebody has given this Linear."""
    return [name for name in vars(linear) if name not in _PLAIN]


def _why_kept(linear: nn.Linear) -> str | None:
    """Why a SplitKGEMM instead would do something else; None if it would not."""
    for name, value in vars(linear).items():
        if "_hooks" in name and value:
            return "has hooks"
        if name in _OF_TIERS or (name not in _PLAIN and hasattr(SplitKGEMM, name)):
            return f"has its own {name}"
    if linear._modules or linear._buffers or set(linear._parameters) != {"weight", "bias"}:
        return "has further parameters, buffers or modules"
    return None
