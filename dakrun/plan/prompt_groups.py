"""How many requests begin together while others run: so that a step with prompts is worth its cost.

Knows a plan, no requests.
"""

from dataclasses import dataclass

from dakrun.geometry import GRAPHED_TOKENS
from dakrun.plan.plan import Plan
from dakrun.plan.prefill import (
    hidden_launch_seconds,
    is_graphed,
    launch_seconds,
    predict_prefill,
)
from dakrun.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class PromptGroups:
    """What the number of requests depends on whose prompts are computed together.

    A step with the prompts of k requests beside decode rows takes

        E = max(F + k p, C - H - T)

    seconds more than the step of the rows alone, T: the GPU needs p for a request's tokens
    (`request_s`) and F besides (`mixed_s`), or waits for the CPU, which launches the step in C
    (`launch_s`), of which the step before hides H (`hidden_s`). Waiting for further slots to
    become free leaves slots idle. With B `slots` and L new tokens a request, a slot becomes free
    every L / B steps, so that k of them have been idle for k^2 L / (2 B) steps in all, each of
    which costs T / B. A request then costs

        E / k - p + k L T / (2 B^2)

    seconds besides those of its tokens. Up to `graphed` requests a step is a graph, and C is 0.
    """

    slots: int
    steps_s: float  # L T
    step_s: float  # T
    request_s: float
    mixed_s: float
    launch_s: float
    hidden_s: float
    graphed: int = 0

    @classmethod
    def of(cls, plan: Plan) -> "PromptGroups":
        """Those of a plan, with launches as long as its profile says. On a CPU none takes time."""
        work, slots = plan.workload, plan.workload.batch_size
        model, on_gpu = plan.profile.kernel_model, plan.profile.device == "cuda"
        graphed = 0
        if is_graphed(plan, slots, work.prompt_len + slots):
            graphed = (GRAPHED_TOKENS - slots) // work.prompt_len
        return cls(
            slots=slots,
            steps_s=work.new_tokens * plan.predicted_s,
            step_s=plan.predicted_s,
            request_s=predict_prefill(plan).predicted_s / slots,
            mixed_s=on_gpu * model.mixed_step_seconds,
            launch_s=on_gpu * launch_seconds(plan),
            hidden_s=hidden_launch_seconds(plan),
            graphed=graphed,
        )

    def best(self) -> int:
        """The number of requests that costs least."""
        longest = self.launch_s - self.hidden_s - self.step_s

        def cost(k: int) -> float:
            gpu_s = self.mixed_s + k * self.request_s
            extra_s = gpu_s if k <= self.graphed else max(gpu_s, longest)
            return extra_s / k + k * self.steps_s / (2 * self.slots**2)

        return min(range(1, ceil_div(self.slots, 2) + 1), key=cost)
