"""Decode steps and whole files of models, measured through dakrun.LLM, and steps of other programs.

What other programs cannot do, or do not do here, is a problem in the result.
"""

import importlib.util
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from dakrun.engine import GraphRunner
from dakrun.errors import CannotRun
from dakrun.hardware import LOCAL
from dakrun.kernels.runtime import card_of, held_to
from dakrun.lab.bench.model import ModelBench, finish, requests
from dakrun.lab.bench.model_sweep import AUTO, ModelCase, ModelSweep
from dakrun.lab.ceilings import Ceilings
from dakrun.lab.evaluate.cases import ablated, remote_names
from dakrun.lab.evaluate.on_cpu import NO_TECHNIQUE
from dakrun.lab.evaluate.points import (
    FUSED,
    OTHER,
    PART_OF,
    PARTS,
    FilePoint,
    PartPoint,
    Result,
    StepPoint,
)
from dakrun.lab.evaluate.predict import lengths, of_file, too_large
from dakrun.lab.evaluate.scope import Scope
from dakrun.llm import LLM
from dakrun.plan import ExpectedRun, Policy
from dakrun.requests import RowLengths

WARM_UP_TOKENS = 4


class Steps:
    """Measures models on `device`. `names` gives, for each model's name, the one to load it by."""

    def __init__(
        self, scope: Scope, device: torch.device, ceilings: Ceilings, names: Mapping[str, str]
    ) -> None:
        self.scope, self.device, self.ceilings, self.names = scope, device, ceilings, names
        self._parts: dict[PartPoint, dict[str, float]] = {}  # of the last step, without its part

    def step(self, point: StepPoint) -> Result:
        """Measure a decode step; CannotRun if it does not fit."""
        if point.without and self.device.type == "cpu":
            return Result(source="measured", problem=NO_TECHNIQUE)
        if too_large(point, self.scope):
            raise CannotRun(too_large(point, self.scope), hint="leave out the figure")
        asked = ModelCase(
            batch_size=point.batch_size,
            ratio=AUTO if point.ratio is None else point.ratio,
            transport=point.transport or AUTO,
            strategy=point.strategy,
        )
        sweep = ModelSweep(
            name=self.names[point.model],
            config=self.scope.models[point.model],
            load_format="dummy",
            policy=Policy(hbm_budget=point.hbm_budget, remote=(point.remote,)),
            prompt_len=point.prompt_len,
            new_tokens=point.new_tokens,
        )
        bench = ModelBench(
            sweep,
            self.scope.profile,
            self.device,
            lambda text: None,
            ceilings=self._ceilings_of(point.remote),
            rounds=1 if self.scope.quick else None,
        )
        with ExitStack() as stack:
            if point.without:  # launches follow their plan, but do without the techniques
                stack.enter_context(held_to(ablated(card_of(self.device), point.without)))
            row, plan = bench.run(asked)
        same = ("limit_s", "ratio", "weight_bytes", "tokens_per_s")
        return Result(
            source="measured",
            seconds=row["step_s"],
            predicted_s=None if point.without else row["predicted_s"],
            required_ratio=plan.required_ratio,
            read_bytes=row["remote_read_bytes"] + row["hbm_read_bytes"],
            remote_bytes=row["remote_read_bytes"],
            **{name: row[name] for name in same},
        )

    def _ceilings_of(self, remote: str) -> Ceilings:
        """The ceilings of HBM and of one remote tier; the profile's if it was not measured."""
        (name,) = remote_names(self.scope, remote)
        tier = self.scope.profile.tier(name)
        direct = self.ceilings.rates.get(name, tier.direct_bytes_per_s)
        copied = self.ceilings.copied.get(name, tier.staged_bytes_per_s)
        return Ceilings({LOCAL: self.ceilings.rates[LOCAL], name: direct}, {name: copied})

    def part(self, point: PartPoint) -> Result:
        """Measure a part of a decode step; all parts are measured at once."""
        whole = replace(point, part="")
        if whole not in self._parts:
            self._parts = {whole: self._measure_parts(point)}
        return Result(source="measured", seconds=self._parts[whole][point.part])

    def _measure_parts(self, point: PartPoint) -> dict[str, float]:
        """Seconds of each part of the median step.

        The launches of an op, of all layers, are timed alone. A fused part is the time with it,
        less the time without. OTHER is the rest of the step: embedding, sampling, and what launches
        cost more, or less, behind those of other ops.
        """
        config = self.scope.models[point.model]
        tokens = point.prompt_len + point.new_tokens
        with LLM(
            self.names[point.model],
            dtype=config.dtype,
            device="cuda",
            profile=self.scope.profile,
            batch_size=point.batch_size,
            max_model_len=tokens,
            expected_prompt=point.prompt_len,
            expected_tokens=point.new_tokens,
            policy=Policy(offload_ratio=0.0, remote=(self.scope.remote,)),
            load_format="dummy",
        ) as llm:
            llm.engine.prompts_first = True  # all rows decode in each step
            rows = [RowLengths(point.prompt_len, point.new_tokens)] * point.batch_size
            finish(llm, requests(rows, config.vocab_size))
            step_s = statistics.median(llm.engine.stats.step_s)
            runner = llm.engine.runner
            if not isinstance(runner, GraphRunner):
                raise CannotRun(f"runs on plain torch: {llm.fallback}", hint="see: dakrun doctor")
            kinds = {op.op.name: PART_OF.get(op.op.category, OTHER) for op in llm.plan.ops}
            length = point.prompt_len + point.new_tokens // 2
            whole, found = runner.op_seconds(length), dict.fromkeys(PARTS, 0.0)
            for op, seconds in whole.items():
                found[kinds.get(op, OTHER)] += seconds
            for name, part in FUSED.items():
                for op, seconds in runner.op_seconds(length, part).items():
                    found[name] += whole[op] - seconds
                    found[kinds[op]] -= whole[op] - seconds
        return {**found, OTHER: found[OTHER] + step_s - sum(found.values())}

    def file(self, point: FilePoint) -> Result:
        """Measure a whole file, from the first step to the last completion.

        As in `dakrun generate`, the longest requests begin first.
        """
        config = self.scope.models[point.model]
        rows = sorted(lengths(point), key=lambda r: (-r.new, -r.prompt))
        with LLM(
            self.names[point.model],
            dtype=config.dtype,
            device="cuda" if self.device.type == "cuda" else "cpu",
            profile=self.scope.profile,
            max_model_len=2 * point.longest,
            expected_run=ExpectedRun(rows),
            policy=Policy(offload_ratio=point.ratio, remote=(point.remote,)),
            load_format="dummy",
        ) as llm:
            short = [row._replace(new=min(row.new, WARM_UP_TOKENS)) for row in rows]
            finish(llm, requests(short, config.vocab_size))
            start = time.perf_counter()
            tokens = finish(llm, requests(rows, config.vocab_size))
            seconds = time.perf_counter() - start
            return replace(
                of_file(llm.plan, rows),
                source="measured",
                seconds=seconds,
                tokens_per_s=tokens / seconds,
            )


def rival(point: StepPoint, scope: Scope, device: torch.device) -> Result:
    """The decode step of the program `point.by`; CannotRun if it does not fit."""
    problem, ratio, again = None, point.ratio or 0.0, None
    if device.type != "cuda":
        problem = "needs a GPU"
    elif point.remote != "host" and ratio:
        problem = f"{point.by} offloads to host memory only"
    elif point.by == "transformers" and ratio:
        problem = "transformers keeps all in HBM"
    elif missing := _missing(point.by, scope):
        problem, again = f"{missing} is not installed", True
    elif problem := too_large(point, scope):
        return Result(source="measured", problem=problem, short_of_memory=True)
    if problem:
        return Result(source="measured", problem=problem, again=again)
    from dakrun.lab.rivals.steps import rival_step

    sizes = {name: getattr(point, name) for name in ("batch_size", "prompt_len", "new_tokens")}
    config, python = scope.models[point.model], scope.vllm_python
    step = rival_step(point.by, config, ratio=ratio, device=device, vllm_python=python, **sizes)
    return Result(
        source="measured",
        seconds=step.seconds,
        ratio=step.ratio,
        weight_bytes=step.weight_bytes,
        remote_bytes=step.ratio * step.weight_bytes,
        tokens_per_s=point.batch_size / step.seconds,
    )


def _missing(by: str, scope: Scope) -> str:
    """The package that the rival `by` needs and lacks, or an empty text."""
    if by.startswith("vllm"):
        from dakrun.lab.rivals.vllm import version

        return "" if scope.vllm_python and version(scope.vllm_python) else "vllm"
    packages = ("transformers", *(["accelerate"] if by == "accelerate" else []))
    return next((name for name in packages if importlib.util.find_spec(name) is None), "")
