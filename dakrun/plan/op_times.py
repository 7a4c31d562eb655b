"""How long each op of a decode step takes, by where its bytes lie.

Knows the model, the workload and the machine; no budgets, and no policy.
"""

from collections.abc import Sequence

from dakrun.config import ModelConfig, Workload
from dakrun.hardware.profile import HardwareProfile
from dakrun.plan.ops import Op, decode_ops
from dakrun.plan.policy import Transport
from dakrun.plan.roofline import Links, compute_time, kernel_time, times_of


class OpTimes:
    """The `ops` of a step, and the time of each over the local tier and the `remote` ones.

    `compute` (seconds of arithmetic of one layer) and `work` (the same as kernels do it) are by op
    name. Problems with different budgets share one, and with it what was reckoned before.
    """

    def __init__(
        self,
        model: ModelConfig,
        workload: Workload,
        profile: HardwareProfile,
        remote: tuple[str, ...],
    ) -> None:
        self.model, self.workload, self.profile, self.remote = model, workload, profile, remote
        self.links = Links.of(profile, remote)
        self.ops = decode_ops(model, workload)
        self.compute = {op.name: compute_time(op, profile, model.dtype) for op in self.ops}
        self.work = {op.name: kernel_time(op, self.compute[op.name], profile) for op in self.ops}

    def times(
        self, op: Op, tier_bytes: Sequence[float], transport: Transport
    ) -> tuple[float, float]:
        """(kernel, link) seconds for one layer of `op` that reads `tier_bytes` of each tier."""
        lines = self.links.named_lines(
            op.read_bytes, self.compute[op.name], staged=transport == "staged"
        )
        return times_of(lines, [n / op.read_bytes for n in tier_bytes])

    def bound(self, op: Op, tier_bytes: Sequence[float], transport: Transport) -> float:
        """The longer of both `times`: what it takes at full rates."""
        return max(self.times(op, tier_bytes, transport))
