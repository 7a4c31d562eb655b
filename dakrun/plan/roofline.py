"""Roofline of an op whose bytes are read from several tiers at once, and its predicted time.

A bound is bytes over bandwidths and FLOPs over rates. A prediction adds the profile's efficiencies
and fixed costs. README.md in this folder derives the formulas.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dakrun.config import DTYPE_BYTES, Dtype, ModelConfig
from dakrun.geometry import FEW_ROWS, SPLITK_MAX_ROWS, SPLITK_UNITS_MAX_ROWS
from dakrun.hardware import LOCAL, Card, HardwareProfile, RemoteTier
from dakrun.launches import SPREAD
from dakrun.plan.ops import Op

COMPUTE = "compute"
MIN_TENSOR_ROWS = 8  # rows of X that a tensor core multiplies at least
STAGED_TOGETHER = 2**24  # bytes; smaller staged parts are copied in groups of up to this size
WHOLE_WAIT = 2**22  # bytes; with few rows, smaller staged parts have a share of the cost of waiting

Regime = Literal["memory-bound", "mixed", "compute-bound"]

# One lower bound of an op's time: constant seconds, plus seconds per ratio by tier number.
Line = tuple[float, Mapping[int, float]]


@dataclass(frozen=True)
class Links:
    """Rates in bytes/s of the tiers in use, the local one first, and of the links they share.

    `direct` and `staged` are rates by tier name; the local tier's are equal. `groups` are sets of
    tiers with a total rate; a tier is in at most one.
    """

    direct: Mapping[str, float]
    staged: Mapping[str, float]
    groups: tuple[tuple[frozenset[str], float], ...] = ()

    @classmethod
    def of(cls, profile: HardwareProfile, remote: Sequence[str]) -> "Links":
        """The local tier and the `remote` ones of `profile`."""
        tiers = [profile.tier(name) for name in remote]
        members = {LOCAL: profile.hbm_group} | {tier.name: tier.group for tier in tiers}
        limits = profile.link_groups
        local = min(profile.hbm_bytes_per_s, limits.get(profile.hbm_group, math.inf))
        groups = [
            (frozenset(name for name, of in members.items() if of == group), rate)
            for group, rate in limits.items()
        ]
        return cls(
            {LOCAL: local} | {tier.name: tier.direct_bytes_per_s for tier in tiers},
            {LOCAL: local} | {tier.name: tier.staged_bytes_per_s for tier in tiers},
            tuple((names, rate) for names, rate in groups if names),
        )

    def rate(self, tiers: Iterable[str], *, staged: bool = False) -> float:
        """Bytes/s of `tiers` together, limited by the totals of their groups."""
        rates, left, total = (self.staged if staged else self.direct), set(tiers), 0.0
        for names, limit in self.groups:
            total += min(limit, sum(rates[tier] for tier in names & left))
            left -= names
        return total + sum(rates[tier] for tier in left)

    def total_rate(self) -> float:
        """Bytes/s of all tiers together, read directly."""
        return self.rate(self.direct)

    def lines(self, read: float, floor: float, *, staged: bool = False) -> dict[str, Line]:
        """Lower bounds of the seconds of an op that reads `read` bytes, by the limiting resource.

        Resources are COMPUTE (with `floor` seconds), each tier, and tiers behind one link ("a+b").
        Direct reads of all tiers run side by side. Staged bytes pass through the local tier, which
        writes and reads each of them as well.
        """
        numbers = {name: i for i, name in enumerate(self.direct)}
        rates = self.staged if staged else self.direct
        lines: dict[str, Line] = {COMPUTE: (floor, {})}
        lines |= {name: (0.0, {numbers[name]: read / rate}) for name, rate in rates.items()}
        if staged:
            local = read / self.direct[LOCAL]
            lines[LOCAL] = 0.0, {i: local if i == 0 else 2 * local for i in numbers.values()}
        for names, rate in self.groups:
            sharing = [n for n in numbers if n in names and not (staged and n == LOCAL)]
            if len(sharing) > 1:  # the rate of a single tier is within the limit already
                shared = {numbers[name]: read / rate for name in sharing}
                lines["+".join(sharing)] = 0.0, shared
        return lines


def line_time(line: Line, ratios: Sequence[float]) -> float:
    """Seconds of one lower bound, at an op's ratio of bytes in every tier."""
    constant, by_tier = line
    return constant + sum(k * ratios[tier] for tier, k in by_tier.items())


def bound_time(lines: Iterable[Line], ratios: Sequence[float]) -> float:
    """Seconds of an op: the largest of its lower bounds."""
    return max(line_time(line, ratios) for line in lines)


def bound_times(lines: Mapping[str, Line], ratios: Sequence[float]) -> tuple[float, float]:
    """(kernel, link) seconds of an op with such `lines`; it takes the longer of both.

    Kernel seconds are those of arithmetic and the local tier, link seconds those of links.
    """
    here = (COMPUTE, LOCAL)
    links = [line for name, line in lines.items() if name not in here]
    kernel = bound_time((lines[name] for name in here), ratios)
    return kernel, bound_time(links, ratios) if links else 0.0


def is_windowed(tier: RemoteTier, card: Card) -> bool:
    """Whether the window of `tier` is smaller than the rings of all its SMs."""
    return tier.window_bytes < tier.sms * card.ring_bytes


def bytes_in_flight(tier: RemoteTier, profile: HardwareProfile) -> float:
    """Bytes in flight that the link of `tier` needs for its full rate: its window, if it has one.

    Otherwise its rate times its latency (Little's law).
    """
    if is_windowed(tier, profile.card):
        return tier.window_bytes
    return tier.direct_bytes_per_s * profile.kernel_model.link_latency_seconds


def matmul_rows(rows: int, profile: HardwareProfile) -> int:
    """Rows of X that a product of `rows` multiplies, padding to a tensor core's tile included."""
    return max(rows, MIN_TENSOR_ROWS) if profile.device == "cuda" else rows


def compute_time(op: Op, profile: HardwareProfile, dtype: Dtype) -> float:
    """Seconds of arithmetic of one layer at the profile's rate, padding rows included."""
    if op.category == "gather":
        return 0.0
    if op.category == "experts":  # each multiplies few rows
        rows_read, rows = op.rows_per_weight, matmul_rows(math.ceil(op.rows_per_weight), profile)
        return op.flops * max(1.0, rows / rows_read) / profile.flops_per_s(dtype, rows)
    linear = op.category == "linear"
    rows = matmul_rows(op.batch_size, profile) if linear else op.batch_size
    return op.flops * rows / op.batch_size / profile.flops_per_s(dtype, rows)


def has_many_rows(op: Op, profile: HardwareProfile) -> bool:
    """Whether the profile's costs of many rows apply to `op`."""
    return (
        op.category == "linear"
        and profile.many_rows is not None
        and op.batch_size > profile.linear.rows[-1]
    )


def op_cost(op: Op, profile: HardwareProfile) -> tuple[float, float]:
    """(seconds, efficiency) of one launch of `op`; a gather costs as much as a linear op.

    Attention costs by its slots: not by their parts, nor by the tokens of a prompt in one. Experts
    cost by the rows that each of them has; quantized ones are as slow as both are.
    """
    if op.category == "attention":
        return profile.attention.at(min(op.units, op.batch_size))
    if op.category == "experts" and profile.device == "cuda":
        rows = op.rows_per_weight
        seconds, efficiency = profile.experts_or_estimate.at(rows)
        if op.quantized:
            efficiency = min(efficiency, _quantized_cost(op, SPREAD * rows, profile)[1])
        return seconds, efficiency
    if op.quantized:
        return _quantized_cost(op, op.batch_size, profile)
    return profile.products.at(op.batch_size)


def _quantized_cost(op: Op, rows: float, profile: HardwareProfile) -> tuple[float, float]:
    """`op_cost` of a product of quantized weights with `rows` rows of X.

    A tile of X takes as long with any number of rows. So rows of up to a tile of the tiled GEMM
    count as the next number that was measured.
    """
    costs = profile.products_of(op.quantized)
    if profile.device == "cuda" and rows <= SPLITK_MAX_ROWS:
        rows = next((n for n in costs.rows if n >= rows), rows)
    return costs.at(rows)


def kernel_compute_time(op: Op, compute: float, profile: HardwareProfile) -> float:
    """Seconds of the kernel's arithmetic that takes `compute` seconds at the profile's rate.

    With many rows, the op's efficiency is that of arithmetic and is applied here. With few rows it
    is that of reading, and is not.
    """
    return compute / op_cost(op, profile)[1] if has_many_rows(op, profile) else compute


def predicted_time(op: Op, kernel: float, profile: HardwareProfile, *, link: float = 0.0) -> float:
    """Predicted seconds of one layer of `op`, with its fixed cost and the norm ahead of it.

    `kernel` seconds of arithmetic and of reading local bytes start when the norm has ended, and
    are divided by the op's efficiency. `link` seconds of reading remote bytes are not: kernels
    request remote bytes before the ops ahead of them end, which keeps links at their full rate.
    Only the router of experts is waited for by both.
    """
    seconds, efficiency = op_cost(op, profile)
    ahead, kernel = norm_time(op, profile), kernel / efficiency
    if profile.device == "cpu":  # the cores read all tiers
        kernel = max(kernel, link / efficiency)
    if op.category == "experts":
        return ahead + max(kernel, link) + seconds
    return max(kernel + ahead, link) + seconds


def staged_time(
    op: Op, kernel: float, profile: HardwareProfile, *, link: float, nbytes: float
) -> float:
    """Predicted seconds of one layer of `op`, of which the copy engine stages `nbytes`.

    The copy takes `link` seconds and overlaps with earlier ops. The kernel takes `kernel` seconds
    as in `predicted_time`, and the profile's extra cost of waiting for the copy. Small parts have a
    share of it: a group of them is waited for once, but copies slow down products of few rows,
    which HBM limits. An op's parts of all layers are at least one group.
    """
    whole = WHOLE_WAIT if op.batch_size <= FEW_ROWS else STAGED_TOGETHER
    wait = profile.staged_seconds * min(1.0, max(nbytes / whole, 1 / op.layers))
    return max(predicted_time(op, kernel, profile) + wait, link)


def norm_time(op: Op, profile: HardwareProfile) -> float:
    """Seconds of the norm ahead of `op`, and of a router; 0 if there is none or costs are unknown.

    Of few rows, a norm between two quantized weights (Op.norm_between) is a part of both products,
    and costs as much as a norm folded into a weight of 16 bits. Any other norm ahead of a quantized
    weight is a launch of its own, behind which the product starts late. Each CTA normalizes one
    row, so few rows take as long as 2 * FEW_ROWS, which are measured as such a launch.
    """
    costs = profile.router_or_estimate if op.category == "experts" else profile.norm
    if not op.normed or costs is None:
        return 0.0
    rows, late = op.batch_size, 0.0
    in_products = op.norm_between and rows <= SPLITK_UNITS_MAX_ROWS
    if op.quantized and op.category == "linear" and not in_products:
        rows, late = max(rows, 2 * FEW_ROWS), profile.kernel_model.late_start_seconds
    seconds, efficiency = costs.at(rows)
    nbytes = 2 * rows * op.shape[1] * op.element_bytes  # read and written
    return nbytes / (profile.hbm_bytes_per_s * efficiency) + seconds + late


def sampling_time(model: ModelConfig, rows: int, profile: HardwareProfile) -> float:
    """Seconds of choosing tokens from `rows` rows of logits; 0 where the cost is unknown."""
    if profile.sampling is None:
        return 0.0
    seconds, efficiency = profile.sampling.at(rows)
    nbytes = rows * model.vocab_size * DTYPE_BYTES[model.dtype]
    return nbytes / (profile.hbm_bytes_per_s * efficiency) + seconds


def regime(op: Op, compute: float, links: Links) -> Regime:
    """The regime of `op`, from times at full rates instead of the ridge point.

    It is mixed if arithmetic takes longer than reading from all tiers, but not than from HBM alone.
    """
    if compute >= op.read_bytes / links.direct[LOCAL]:
        return "compute-bound"
    return "memory-bound" if compute < op.read_bytes / links.total_rate() else "mixed"
