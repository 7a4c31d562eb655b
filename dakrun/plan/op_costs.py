"""Stage 1 of planning: the time of an op of a decode step under a placement.

Knows the model, the workload and the machine; knows neither budgets nor a policy.
"""

from collections.abc import Sequence

from dakrun.config import ModelConfig, Workload
from dakrun.hardware import HardwareProfile
from dakrun.plan.cta_model import launch_times, sms_by_tier
from dakrun.plan.expert_choices import deviation_s, mean_longer
from dakrun.plan.footprint import activation_bytes, vector_bytes
from dakrun.plan.ops import Op, decode_ops
from dakrun.plan.placed_op import PlacedOp
from dakrun.plan.policy import Transport
from dakrun.plan.roofline import (
    Links,
    bound_times,
    compute_time,
    kernel_compute_time,
    predicted_time,
    staged_time,
)

Counts = tuple[int, ...]  # units or slots by tier


class StepCosts:
    """The `ops` of a step, and the time of each over the local tier and the `remote` ones.

    `compute` has the seconds of arithmetic of one layer at the profile's rate, by op name; `work`
    the same at the kernels' efficiency. `vector_bytes` stay in the local tier. Problems of one
    workload share one StepCosts and its cache. `profile` is that of steps of these ops, whose
    operands may stay in L2. With one remote tier and `divides_slots`, few slots are divided (see
    ops.decode_ops).
    """

    def __init__(
        self,
        model: ModelConfig,
        workload: Workload,
        profile: HardwareProfile,
        remote: tuple[str, ...],
        *,
        divides_slots: bool = True,
    ) -> None:
        self.model, self.workload, self.remote = model, workload, remote
        divided = divides_slots and len(remote) == 1
        self.ops = decode_ops(model, workload, divides_slots=divided)
        self.profile = profile.for_steps(sum(op.layers * op.read_bytes for op in self.ops))
        profile = self.profile
        self.links = Links.of(profile, remote)
        self.compute = {op.name: compute_time(op, profile, model.dtype) for op in self.ops}
        self.work = {
            op.name: kernel_compute_time(op, self.compute[op.name], profile) for op in self.ops
        }
        self.vector_bytes = vector_bytes(model)
        self._activations: dict[int, int] = {}
        self._placed: dict[tuple[str, tuple[Counts, ...], Transport], PlacedOp] = {}

    def over(self, tier: str) -> "StepCosts":
        """The costs of the same step over the local tier and one of its remote tiers.

        Slots are divided only if that is the first: local slots can spill into no other.
        """
        first = tier == self.remote[0]
        return StepCosts(self.model, self.workload, self.profile, (tier,), divides_slots=first)

    def activations(self, chunk_tokens: int) -> int:
        """Bytes of activations, where prompt passes have up to `chunk_tokens`."""
        if chunk_tokens not in self._activations:
            held = activation_bytes(self.model, self.workload, chunk_tokens)
            self._activations[chunk_tokens] = held
        return self._activations[chunk_tokens]

    def roofline(
        self, op: Op, tier_bytes: Sequence[float], transport: Transport
    ) -> tuple[float, float]:
        """(kernel, link) seconds of one layer of `op` that reads `tier_bytes` of each tier."""
        lines = self.links.lines(op.read_bytes, self.compute[op.name], staged=transport == "staged")
        return bound_times(lines, [n / op.read_bytes for n in tier_bytes])

    def bound(self, op: Op, tier_bytes: Sequence[float], transport: Transport) -> float:
        """Seconds of one layer of `op` at full rates: the longer of both `roofline` times."""
        return max(self.roofline(op, tier_bytes, transport))

    def in_place(self, op: Op, counts: Counts) -> tuple[float, float]:
        """(kernel, link) seconds of a layer with `counts` units per tier, each read where it lies.

        The parts have the SMs of `sms_by_tier`.
        """
        compute, bound = self.compute[op.name], self.bound(op, op.tier_bytes(counts), "direct")
        sms = sms_by_tier(op, [counts], compute, bound, self.profile, self.remote)
        return launch_times(op, counts, sms, compute, self.profile, self.remote)

    def placed(self, op: Op, placement: tuple[Counts, ...], transport: Transport) -> PlacedOp:
        """`op` with the given units per layer and tier, its SMs and its time.

        Staged is only what has remote bytes, and of which a step may copy these.
        """
        local = sum(op.shares(counts)[0] for counts in placement) / len(placement)
        if local == 1 or not op.can_be_staged(local):
            transport = "direct"
        key = op.name, placement, transport
        if key not in self._placed:
            self._placed[key] = self._cost(op, placement, transport)
        return self._placed[key]

    def _cost(self, op: Op, placement: tuple[Counts, ...], transport: Transport) -> PlacedOp:
        profile, remote, compute = self.profile, self.remote, self.compute[op.name]

        def reads(counts: Counts) -> list[float]:
            """Bytes that a layer reads of each tier, or copies from it."""
            read = op.tier_reads(counts)
            return [read[0], *op.tier_bytes(counts)[1:]] if transport == "staged" else read

        times = {counts: self.roofline(op, reads(counts), transport) for counts in set(placement)}
        bounds = tuple(max(times[counts]) for counts in placement)
        sms: Counts = (profile.sms, *(0 for _ in remote))
        if transport == "direct":  # staged bytes are read from the local tier, by all SMs
            sms = sms_by_tier(op, placement, compute, sum(bounds) / len(bounds), profile, remote)

        def predicted(counts: Counts) -> float:
            """Predicted seconds of one layer with the given units per tier."""
            kernel, link = times[counts]
            if transport == "direct":
                launched = launch_times(op, counts, sms, compute, profile, remote)
                kernel, link = max(kernel, launched[0]), max(link, launched[1])
            elif any(counts[1:]):
                staged = sum(op.tier_bytes(counts)[1:])
                return staged_time(op, kernel, profile, link=link, nbytes=staged)
            seconds = predicted_time(op, kernel, profile, link=link)
            if op.chances and any(counts[1:]):
                seconds += self._uneven_choices_s(op, counts, kernel, link)
            return seconds

        predictions = {counts: predicted(counts) for counts in times}
        return PlacedOp(
            op=op,
            transport=transport,
            sms=sms,
            placement=placement,
            bounds_s=bounds,
            predicted_s=tuple(predictions[counts] for counts in placement),
        )

    def _uneven_choices_s(self, op: Op, counts: Counts, kernel: float, link: float) -> float:
        """Seconds that a layer of experts takes beyond the longer of its mean times.

        The slower link stands for all remote tiers.
        """
        reads, rates = op.tier_reads(counts), list(self.links.direct.values())
        slowest = max(range(1, len(rates)), key=lambda tier: reads[tier] / rates[tier])
        deviation = deviation_s(op, counts, slowest, rates[0], rates[slowest])
        return mean_longer(kernel, link, deviation) - max(kernel, link)


def waits_s(ops: Sequence[PlacedOp], links: Links) -> float:
    """Seconds that direct and staged reads from the same tier wait for each other.

    Copies run ahead while other ops read directly. Copies and direct reads of matrices take the
    link from each other, for as long as the shorter of both needs it. Attention waits for none:
    copies are held back from it where that matters (see bytes_ahead). `links` has the tiers of
    `ops` in their order.
    """
    seconds = 0.0
    for tier, name in enumerate(links.direct):
        needed = {"direct": 0.0, "staged": 0.0}
        for op in ops:
            if tier and op.op.category == "linear":
                rates = links.staged if op.transport == "staged" else links.direct
                needed[op.transport] += op.read_bytes(tier) / rates[name]
        seconds += min(needed.values())
    return seconds
