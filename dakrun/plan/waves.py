"""How many SMs read each tier of an op, and how long they take with what each of them is dealt.

Knows the kernels' round-robin (dakrun/geometry.py), how many SMs keep a tier busy, and the
placement of one op alone. Its constants were measured on H200s.
"""

import math
from collections.abc import Callable, Sequence

from dakrun.geometry import (
    FEW_ROWS,
    ROWS_PER_BLOCK,
    SHARED_BYTES_PAIRED,
    SPLITK_MAX_ROWS,
    even_group,
    group_count,
)
from dakrun.hardware import HardwareProfile, RemoteTier
from dakrun.plan.in_flight import bytes_needed, is_windowed
from dakrun.plan.many_rows import many_rows_sms, many_rows_times
from dakrun.plan.ops import Op
from dakrun.plan.roofline import predicted_time
from dakrun.units import ceil_div

# A local part takes as long as HBM for its bytes, and as its busiest CTA: so much of the latter. In
# chains of products with 0 to 7% on a peer, read by 8 to 16 of 132 SMs, it was 0.5 to 0.7.
BUSIEST_SHARE = 0.5
EVEN_SMS = 0.97  # of all, at work in the chains that the costs of ops were measured in
# Of HBM's rate, were all SMs that attend to remote slots, and those that suffice for the whole one.
OTHERS_COST = 0.48
ENOUGH_SMS = 0.5
NO_LATER = 1.002  # times the soonest: what SMs more for a remote part have to gain
# Over what a link needs in flight, for attention: its rings hold blocks until they are attended to.
# 4 of 64 slots of 8,192 positions on a peer, read by 16, 11 and 10 SMs: 489, 475 and 475 us.
KEPT_IN_RINGS = 1.3
# Of a link's rate, where local CTAs read it among their own: products with 8% on a peer, in chains,
# and 64 slots with 5 of them there.
MIXED_LINK = 0.965
FEWER_SMS_COST = 0.05  # of a link's rate, by half of the SMs that fill its window: PCIe 5
# From the end of a launch's reads to those that depend on it, in decode steps; less in chains.
BETWEEN_SECONDS = 4.8e-6


def sms_by_tier(
    op: Op,
    placement: Sequence[Sequence[int]],
    compute: float,
    bound: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[int, ...]:
    """SMs for each tier's part of `op`, the local one first.

    A remote part gets what saturates its link, or what its share of the arithmetic needs to end
    within `bound` seconds if that is more, as long as the local part keeps one. A linear op's gets
    the fewest with which the op ends as soon, but for what is NO_LATER, and attention's no more
    than keep the link busy. A part that is to be mixed with the local one, whose SMs then read it,
    gets none: where the op so ends sooner, and the link needs no window.
    """
    units = [sum(counts) for counts in zip(*placement, strict=True)]
    if _is_tiled(op, profile):
        return many_rows_sms(op, units, compute, profile, remote)
    sms, needed = [], []
    for name, held in zip(remote, units[1:], strict=True):
        share = held / sum(units)
        needed.append(math.ceil(profile.sms * share * compute / bound) if bound else 0)
        sms.append(max(profile.tier(name).sms, needed[-1]) if held else 0)
    spare = 1 if units[0] else 0
    while sum(sms) > max(profile.sms - spare, len(sms)):
        sms[sms.index(max(sms))] -= 1
    if op.category == "linear" and units[0]:
        counts = [math.ceil(n / len(placement)) for n in units]
        for tier, most in enumerate(sms):

            def seconds(count: int, tier: int = tier) -> float:
                given = [*sms[:tier], count, *sms[tier + 1 :]]
                dealt = (profile.sms - sum(given), *given)
                kernel, link = read_times(op, counts, dealt, profile, remote)
                return predicted_time(op, max(kernel, compute), profile, link=link)

            options = {n: seconds(n) for n in range(min(max(1, needed[tier]), most), most + 1)}
            soonest = min(options.values())
            sms[tier] = min(n for n, took in options.items() if took <= soonest * NO_LATER)
    if op.category == "attention" and units[0]:
        enough = [_attention_sms(profile.tier(name)) for name in remote]
        sms = [min(most, max(least)) for most, *least in zip(sms, needed, enough, strict=True)]
    local = profile.sms - sum(sms) if units[0] else 0
    return _mixed(op, placement, compute, (local, *sms), profile, remote)


def _mixed(
    op: Op,
    placement: Sequence[Sequence[int]],
    compute: float,
    sms: tuple[int, ...],
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[int, ...]:
    """With the first remote part that may be read by the local one's SMs read so, if that pays."""
    counts = [math.ceil(sum(of) / len(placement)) for of in zip(*placement, strict=True)]
    first = next((tier for tier, count in enumerate(counts) if tier and count), 0)
    many = op.category == "linear" and op.batch_size > FEW_ROWS
    if not (first and counts[0]) or many or is_windowed(profile.tier(remote[first - 1])):
        return sms
    mixed = (sms[0] + sms[first], *(0 if t == first else n for t, n in enumerate(sms) if t))

    def seconds(dealt: Sequence[int]) -> float:
        kernel, link = read_times(op, counts, dealt, profile, remote)
        return predicted_time(op, max(kernel, compute), profile, link=link)

    return mixed if seconds(mixed) < seconds(sms) else sms


def _attention_sms(tier: RemoteTier) -> int:
    """SMs whose rings hold what the link of `tier` needs in flight; with a window all its own."""
    if is_windowed(tier):
        return tier.sms
    return math.ceil(KEPT_IN_RINGS * bytes_needed(tier) / SHARED_BYTES_PAIRED)


def _is_tiled(op: Op, profile: HardwareProfile) -> bool:
    """Whether the tiled GEMM computes `op`, on a machine that has been seen to have it.

    Small weights at up to 64 rows are SplitK_GEMM's; their ops are planned for as if they were not.
    """
    many = op.category == "linear" and op.batch_size > FEW_ROWS
    return many and profile.many_rows is not None


def launch_times(
    op: Op,
    counts: Sequence[int],
    sms: Sequence[int],
    compute: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[float, float]:
    """(kernel, link) seconds of a layer of `op` with `sms[t]` SMs for `counts[t]` units of tier t.

    With few rows `compute` seconds of arithmetic are left aside.
    """
    if _is_tiled(op, profile):
        return many_rows_times(op, counts, sms, compute, profile, remote)
    return read_times(op, counts, sms, profile, remote)


def read_times(
    op: Op,
    counts: Sequence[int],
    sms: Sequence[int],
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[float, float]:
    """(kernel, link) seconds in which `sms[t]` SMs read `counts[t]` units of one layer of tier t.

    Where that are none, the local tier's read them. Beside what `roofline` bounds that counts the
    local part's busiest CTA, the last waves of remote parts, of fewer CTAs, and that links stand
    still between launches.
    """
    if profile.device != "cuda" or op.category == "gather":
        return 0.0, 0.0
    unit = op.read_bytes / op.units
    local = unit * counts[0] / profile.hbm_bytes_per_s
    parts = list(zip(map(profile.tier, remote), counts[1:], sms[1:], strict=True))
    mixed = sum(count for _, count, own in parts if not own)
    if op.category == "attention":  # its chunks are short, and dealt out by need
        share = sms[0] / profile.sms
        others = max(0.0, EVEN_SMS - share) * OTHERS_COST
        kernel = local * (1 + others) / min(1.0, share / ENOUGH_SMS) if local else 0.0
        links = [_mixed_seconds(unit * n, tier) for tier, n, own in parts if not own]
        return kernel, max(links, default=0.0)
    fixed, rows = profile.linear.at(op.batch_size)[0], op.batch_size
    links = []
    for tier, row_blocks, own in parts:
        if not row_blocks:
            continue
        if own:
            ctas, group = float(min(own, row_blocks)), even_group(row_blocks, min(own, row_blocks))
            seconds = unit * _waves(row_blocks, own, _link_rate(tier, rows))
        else:
            ctas = sms[0] * row_blocks / (counts[0] + mixed)
            group = even_group(counts[0], sms[0], mixed)
            seconds = _mixed_seconds(unit * row_blocks, tier)
        # HBM stands still as well between launches, which is part of an op's fixed cost.
        idle = max(0.0, BETWEEN_SECONDS - _held(rows, ctas, group) / tier.direct_bytes_per_s)
        links.append(seconds + max(0.0, idle - fixed))
    return local * _unevenness(counts[0], sms[0], profile.sms, mixed), max(links, default=0.0)


def _mixed_seconds(nbytes: float, tier: RemoteTier) -> float:
    """Seconds in which local CTAs read `nbytes` of `tier` among their own."""
    return nbytes / (tier.direct_bytes_per_s * MIXED_LINK)


def _unevenness(row_blocks: int, ctas: int, sms: int, mixed: int = 0) -> float:
    """What `row_blocks` dealt to `ctas` take, as a multiple of HBM's time for their bytes.

    They have `mixed` row blocks of another tier among them. 1 stands for the chains on all `sms`
    that the costs of ops were measured in.
    """
    if not row_blocks:
        return 1.0
    ctas = min(max(1, ctas), row_blocks + mixed)
    group = even_group(row_blocks, ctas, mixed)
    busiest = group * ceil_div(group_count(group, row_blocks, mixed), ctas)
    return 1 + BUSIEST_SHARE * (busiest * sms / (row_blocks + mixed) - 1 / EVEN_SMS)


def _held(rows: int, ctas: float, group: int) -> float:
    """Bytes of W that rings of `ctas` hold, which X has a part of."""
    tiles = ceil_div(min(rows, SPLITK_MAX_ROWS), ROWS_PER_BLOCK)
    return ctas * SHARED_BYTES_PAIRED * group / (group + tiles)


def _waves(row_blocks: int, sms: int, rate: Callable[[int, int], float]) -> float:
    """Time over a row block's bytes for as many waves as CTAs, one an SM, take `row_blocks` in.

    `rate` is in bytes/s, by the CTAs that are at it and the row blocks of a group.
    """
    if not row_blocks:
        return 0.0
    ctas = min(max(1, sms), row_blocks)
    group = even_group(row_blocks, ctas)
    whole, last = divmod(ceil_div(row_blocks, group), ctas)
    behind = max(0, row_blocks - whole * ctas * group) if last else 0
    seconds = (row_blocks - behind) / rate(ctas, group)
    return seconds + (behind / rate(last, group) if behind else 0.0)


def _link_rate(tier: RemoteTier, rows: int) -> Callable[[int, int], float]:
    """Bytes/s of `tier`, for `rows` of X, by CTAs and the row blocks of a group.

    CTAs have in flight what their rings hold, which X has a part of, or the window. Where that is
    all that the tier's SMs could hold, the link needs so much in flight as its latency says; else
    the window, which is not used as well in few hands.
    """
    whole, needed = tier.direct_bytes_per_s, bytes_needed(tier)
    windowed = is_windowed(tier)

    def rate(ctas: int, group: int) -> float:
        held, fewer = _held(rows, ctas, group), max(0.0, 1 - ctas / tier.sms) if windowed else 0.0
        return whole * min(1.0, held / needed) / (1 + FEWER_SMS_COST * 2 * fewer)

    return rate
