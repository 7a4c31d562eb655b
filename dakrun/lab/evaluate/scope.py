"""The scope of an evaluation: models, machine, rivals, and how many points a figure has.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from dakrun.config import ModelConfig, Workload
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.lab.evaluate.points import OpPoint, StepPoint
from dakrun.plan import Links, Op, Plan, Policy, decode_ops, make_plan

AnOp = TypeVar("AnOp", bound=OpPoint)
ROOM = 10**15  # bytes
TINY = Path(__file__).with_name("tiny")  # a model of one layer, for all figures in seconds on a CPU
QUICK_STEPS, FULL_STEPS = 8, 31  # decode steps of a point


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What to evaluate: `models` by name, on the machine of `profile`, against `rivals`.

    `remote` names the tier outside HBM. `vllm_python` is the interpreter of an environment with
    vLLM, for the rivals of it. With `quick` figures have fewer points of fewer steps.
    With `predict` nothing is measured: all points are the planner's.
    """

    models: Mapping[str, ModelConfig]
    profile: HardwareProfile
    remote: str
    quick: bool
    predict: bool
    rivals: Sequence[str] = ()
    vllm_python: Path | None = None

    @property
    def new_tokens(self) -> int:
        """New tokens of a request; the first is the prompt's."""
        return (QUICK_STEPS if self.quick else FULL_STEPS) + 1

    @property
    def near(self) -> str:
        """What the local tier is called."""
        return "HBM" if self.profile.device == "cuda" else "local memory"

    @property
    def outside(self) -> str:
        """The axis of offload ratios."""
        return f"weight and KV bytes outside {self.near} (%)"

    @cached_property
    def links(self) -> Links:
        """Rates of HBM and of the remote tier."""
        return Links.of(self.profile, (self.remote,))

    @cached_property
    def rates(self) -> tuple[float, float, float]:
        """Bytes/s of HBM, of direct reads of the remote tier, and of its copies."""
        links = self.links
        return links.direct[LOCAL], links.direct[self.remote], links.staged[self.remote]

    @property
    def turning_point(self) -> float:
        """The ratio at which HBM and the remote tier take the same time."""
        local, remote, _ = self.rates
        return remote / (local + remote)

    def ratios(self) -> list[float]:
        """Offload ratios of a curve: around the turning point, then up to 100%, or 60% if quick."""
        parts = (0.5, 1, 2) if self.quick else (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3)
        far = (0.1, 0.3, 0.6) if self.quick else (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
        near = {round(part * self.turning_point, 4) for part in parts}
        return sorted({0.0, *(x for x in near if x < 0.9), *far})

    def some_ratios(self) -> list[float]:
        """Fewer of them, for steps that take long to prepare."""
        far = (0.1, 0.3) if self.quick else (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
        near = round(self.turning_point, 4)
        return sorted({0.0, near, *far}) if near < 0.9 else [0.0, *far]

    def step(self, model: str, batch_size: int, ratio: float | None, **more: Any) -> StepPoint:
        """A decode step of `model` with this scope's new tokens and remote tier."""
        common = {"new_tokens": self.new_tokens, "remote": self.remote}
        return StepPoint(model=model, batch_size=batch_size, ratio=ratio, **{**common, **more})

    def op(self, kind: type[AnOp], model: str, ratio: float, **more: Any) -> AnOp:
        """A point of an op of `model` with this scope's remote tier."""
        return kind(model=model, ratio=ratio, remote=self.remote, **more)

    def ops(self, model: str, *, batch_size: int, prompt_len: int = 32) -> tuple[Op, ...]:
        """The ops of a decode step of `model`, whether it fits or not."""
        workload = self._workload(batch_size, prompt_len, self.new_tokens)
        return decode_ops(self.models[model], workload)

    def products(self, model: str, *, n: int) -> list[Op]:
        """The linear ops of a layer with `n` rows of X."""
        ops = self.ops(model, batch_size=n)
        return [op for op in ops if op.in_layer and op.category == "linear"]

    def plan(self, point: StepPoint) -> Plan:
        """The plan of a decode step on this machine; CannotRun if it does not fit."""
        workload = self._workload(point.batch_size, point.prompt_len, point.new_tokens)
        policy = Policy(
            hbm_budget=point.hbm_budget,
            offload_ratio=point.ratio,
            transport=point.transport,
            strategy=point.strategy,
            remote=(point.remote,),
        )
        return make_plan(self.models[point.model], workload, self.profile, policy)

    def roomy(self) -> "Scope":
        """The same machine with room for everything in every tier."""
        tiers = tuple(replace(tier, capacity_bytes=ROOM) for tier in self.profile.remote)
        return replace(self, profile=replace(self.profile, hbm_capacity_bytes=ROOM, remote=tiers))

    def _workload(self, batch_size: int, prompt_len: int, new_tokens: int) -> Workload:
        return Workload(
            batch_size=batch_size,
            prompt_len=prompt_len,
            new_tokens=new_tokens,
            max_model_len=prompt_len + new_tokens,
        )
