"""Results of points measured on a GPU or a CPU, one after the other.

steps.py measures models and other programs, kernels.py single ops and reads on a GPU, on_cpu.py
single ops on a CPU. What cannot be measured is a result with its `problem`.
"""

import gc
import os
import traceback
from dataclasses import replace

import torch

from dakrun.engine import gpu_errors
from dakrun.errors import DakrunError, GpuFailed, OutOfGpuMemory
from dakrun.hardware import LOCAL
from dakrun.lab.ceilings import FULL, Ceilings
from dakrun.lab.evaluate.cases import remote_names
from dakrun.lab.evaluate.on_cpu import op_on_cpu
from dakrun.lab.evaluate.points import (
    BatchPoint,
    FilePoint,
    OpPoint,
    PartPoint,
    Point,
    ReadPoint,
    Result,
    StepPoint,
)
from dakrun.lab.evaluate.predict import predict
from dakrun.lab.evaluate.scope import TINY, Scope
from dakrun.lab.evaluate.steps import Steps, rival
from dakrun.lab.memory import measure_ceilings


class Measurer:
    """Measures points of `scope` on `device`; a context manager that frees what it holds.

    `ceilings` are those of an earlier run; None measures them on a GPU, and takes the profile's for
    a CPU.
    """

    def __init__(self, scope: Scope, device: torch.device, ceilings: Ceilings | None = None):
        self.scope, self.device = scope, device
        self.ceilings = ceilings or self._measured()
        names = {name: str(TINY) if name == TINY.name else name for name in scope.models}
        self._steps = Steps(scope, device, self.ceilings, names)
        self._kernels = None
        if device.type == "cuda":
            from dakrun.lab.evaluate.kernels import Kernels

            self._kernels = Kernels(scope, device)

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._kernels and not any(isinstance(of, GpuFailed) for of in exc):
            self._kernels.close()

    def __call__(self, point: Point) -> Result:
        """Measure `point`. Raises GpuFailed if no later point can be measured in this process."""
        planned = self._planned(point)
        problem, short, again = "", None, None
        try:
            with gpu_errors():
                result = self._measure(point)
        except GpuFailed as error:
            if not self._works():
                raise
            problem = str(error)
        except MemoryError as error:
            problem, short, again = f"memory ran out: {error}", True, True
        except DakrunError as error:
            problem = (planned.problem if planned.short_of_memory else None) or str(error)
            short = planned.short_of_memory or isinstance(error, OutOfGpuMemory) or None
        except Exception as error:  # one point must not end a run of hours
            if os.environ.get("DAKRUN_DEBUG") == "1":
                traceback.print_exc()
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if problem:
            result = Result(source="measured", problem=problem, short_of_memory=short, again=again)
        if self.device.type == "cuda":  # the memory of the point, or of the error that ended it
            gc.collect()
            torch.cuda.empty_cache()
        if not self.scope.profile.comparable:
            result = replace(result, predicted_s=None)  # of a nominal profile
        elif result.predicted_s is None and result.seconds is not None:
            result = replace(result, predicted_s=planned.predicted_s)
        if result.problem and result.required_ratio is None:
            result = replace(result, required_ratio=planned.required_ratio)
        return result

    def _measure(self, point: Point) -> Result:
        if self._kernels and isinstance(point, StepPoint | FilePoint | PartPoint):
            self._kernels.close()  # models need the memory
        if isinstance(point, FilePoint):
            return self._steps.file(point)
        if isinstance(point, StepPoint):
            if point.by == "dakrun":
                return self._steps.step(point)
            return rival(point, self.scope, self.device)
        if self._kernels is None:
            return op_on_cpu(point, self.scope)
        if isinstance(point, PartPoint):
            return self._steps.part(point)
        if isinstance(point, BatchPoint):
            return self._kernels.batch(point)
        if isinstance(point, ReadPoint):
            return self._kernels.read(point)
        assert isinstance(point, OpPoint)
        return self._kernels.op(point)

    def _measured(self) -> Ceilings:
        profile = self.scope.profile
        tiers = [profile.tier(name) for name in remote_names(self.scope, self.scope.remote)]
        if self.device.type == "cuda":
            return measure_ceilings(tiers, FULL, self.device, copies=True)
        rates = {tier.name: tier.direct_bytes_per_s for tier in tiers}
        copied = {tier.name: tier.staged_bytes_per_s for tier in tiers}
        return Ceilings({LOCAL: profile.hbm_bytes_per_s, **rates}, copied)

    def _planned(self, point: Point) -> Result:
        """The planner's result; one with the problem if it fails."""
        try:
            return predict(point, self.scope)
        except Exception as problem:  # one point must not end a run of hours
            return Result(source="predicted", problem=f"{type(problem).__name__}: {problem}")

    def _works(self) -> bool:
        """Whether the GPU still runs anything in this process."""
        try:
            return torch.zeros(1, device=self.device).item() == 0
        except RuntimeError:
            return False
