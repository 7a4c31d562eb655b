"""Costs of kernels that a profile has not measured: quantized weights, routers and experts.

They follow from the profile's rates and what one SM does, as far as it was measured on other cards.
`dakrun profile` measures all of them, `--profile auto` those that the run's models need.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dakrun.hardware.parts import ComputeRate, OpCosts

if TYPE_CHECKING:
    from dakrun.hardware.profile import HardwareProfile

FEW = (8, 16, 64)  # rows of X: one and two tiles of SplitK_GEMM, and a tile of the tiled GEMM


@dataclass(frozen=True)
class Elements:
    """Elements of quantized weights, in the groups that most checkpoints have.

    An element takes `nbytes` with its part of the scales. With FEW rows of X an SM expands and
    multiplies one in `sm_s` seconds. With many rows a product reaches the share `many` of its rate
    with 16 bits. On a CPU plain torch expands W in each product (AVX2): the share `cpu` of it.
    """

    nbytes: float
    sm_s: tuple[float, float, float]
    many: float
    cpu: float


# Fitted on an H200 at commit f444fd1 to W of 28672x4096, 4096x14336 and 4096x4096, as `dakrun
# profile` fits costs; eight bits are e4m3. With few rows an H100 has the same `sm_s`.
QUANTIZED = {
    "int4": Elements(0.516, (18.7e-12, 31.4e-12, 55.6e-12), 0.97, 0.012),
    "int4_zeros": Elements(0.531, (21.3e-12, 32.7e-12, 55.6e-12), 0.97, 0.012),
    "e2m1": Elements(0.594, (27.9e-12, 36.8e-12, 66.9e-12), 0.87, 0.012),
    "eight_bits": Elements(1.031, (22.5e-12, 35.3e-12, 61.4e-12), 0.87, 0.02),
}
# Kinds of costs that are estimated where a profile has not measured them.
ESTIMATED = frozenset({*QUANTIZED, "experts", "router"})
SUMS_S = 0.35e-6, 0.7e-6, 2.6e-6  # to add up the warps' shares of K, with FEW rows
# An SM expands elements while others arrive. Where both take about as long, each waits for the
# other at times: together they take (reading^4 + expanding^4)^(1/4). With this exponent cards of
# 3.2 and 4.6 TB/s have the same `sm_s`.
TOGETHER = 4

# By the rows of X that an expert has: the share of the rate of HBM, or of arithmetic, and the bytes
# of W that an SM takes in a second. With 32 rows and more they are those of the grouped tiled GEMM,
# copies of rows included. Of layers of Qwen3-30B-A3B: the shares on an H100, with 1 to 4,096 rows,
# what SMs take on an H200 (costs.experts of its profile, 2026-11-29); with 256 rows, where
# arithmetic is the limit, as with 32.
EXPERTS = {1: (0.917, 31.3e9), 4: (0.917, 27.9e9), 32: (0.9, 29.8e9), 256: (0.65, 29.8e9)}
EXPERTS_S = 5.3e-6  # of a product, besides W: from the router's list to the first bytes, and sums
# The norm and the router of Qwen3-30B-A3B, which nothing overlaps, on an H100; by rows of X.
ROUTER = {8: 7.6e-6, 64: 13.4e-6, 512: 35.3e-6, 4096: 112e-6}


def weight_rate(n: int, hbm_rate: float, compute: ComputeRate, element_bytes: float = 2.0) -> float:
    """Bytes/s of a weight whose product with `n` rows waits for HBM or arithmetic alone.

    Each element, of `element_bytes`, takes 2 n FLOP. Efficiencies of products are shares of it.
    """
    return min(hbm_rate, compute.at(n) * element_bytes / (2 * n))


def quantized(profile: "HardwareProfile", kind: str) -> OpCosts:
    """Costs of products with quantized weights of a `kind` of QUANTIZED, by rows of X."""
    elements, many = QUANTIZED[kind], profile.many_rows
    if profile.device == "cpu":
        shares = tuple(share * elements.cpu for share in profile.linear.efficiency)
        return replace(profile.linear, efficiency=shares)
    rows: list[int] = []
    costs: list[tuple[float, float]] = []
    for n, sm_s, sums_s in zip(FEW, elements.sm_s, SUMS_S, strict=True):
        seconds, efficiency = profile.linear.at(n)
        best = elements.nbytes / _rate(profile, n, elements.nbytes)
        limits = best / efficiency, sm_s / profile.sms
        both = sum(limit**TOGETHER for limit in limits) ** (1 / TOGETHER)
        rows.append(n)
        costs.append((seconds + sums_s, best / both))
    for n in (n for n in (many.rows if many else ()) if n > FEW[-1]):
        seconds, efficiency = profile.products.at(n)
        rows.append(n)
        costs.append((seconds, efficiency * elements.many))
    seconds_of, efficiencies = zip(*costs, strict=True)
    return OpCosts(rows=tuple(rows), seconds=seconds_of, efficiency=efficiencies)


def experts(profile: "HardwareProfile") -> OpCosts:
    """Costs of a GPU's product with experts, by the rows of X that each has."""
    found = []
    for n, (share, sm_rate) in EXPERTS.items():
        best = _rate(profile, n, 2.0)
        found.append(min(share, sm_rate * profile.sms / best))
    return OpCosts(rows=tuple(EXPERTS), seconds=(EXPERTS_S,) * len(found), efficiency=tuple(found))


def router(profile: "HardwareProfile") -> OpCosts | None:
    """Costs of a norm with a router behind it, by rows of X; a CPU's norm stands for both."""
    if profile.device == "cpu":
        return profile.norm
    return OpCosts(
        rows=tuple(ROUTER), seconds=tuple(ROUTER.values()), efficiency=(1.0,) * len(ROUTER)
    )


def _rate(profile: "HardwareProfile", n: int, element_bytes: float) -> float:
    """Bytes/s of a weight whose product with `n` rows waits for HBM or 16-bit arithmetic alone."""
    compute = profile.compute.get("float16") or next(iter(profile.compute.values()))
    return weight_rate(n, profile.hbm_bytes_per_s, compute, element_bytes)
