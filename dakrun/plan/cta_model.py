"""CTA model: the number of SMs that read each tier of an op, and the time of its busiest CTAs.

Knows the round-robin of row blocks over CTAs (dakrun/geometry.py), one op's placement and the
profile's KernelModel. README.md in this folder derives the formulas.
"""

import math
from collections.abc import Callable, Sequence

from dakrun.geometry import (
    ATOM_BYTES,
    FEW_ROWS,
    ROWS_PER_BLOCK,
    SPLITK_MAX_ROWS,
    even_group,
    group_count,
)
from dakrun.hardware import Card, HardwareProfile, KernelModel, RemoteTier
from dakrun.launches import group_sizes, kernel_for
from dakrun.plan.many_rows import many_rows_sms, many_rows_times
from dakrun.plan.ops import Op
from dakrun.plan.roofline import bytes_in_flight, is_windowed, predicted_time
from dakrun.units import ceil_div

SM_GAIN = 1.002  # a remote part gets more SMs only if the op becomes faster by this factor


def sms_by_tier(
    op: Op,
    placement: Sequence[Sequence[int]],
    compute: float,
    bound: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[int, ...]:
    """SMs for each tier's part of `op`, the local one first.

    `placement` has the units per tier of every layer, `compute` and `bound` are seconds of a
    layer's arithmetic and of its roofline. The local part keeps at least one SM.

    - A remote part starts with the SMs that saturate its link, or with more if its part of the
      arithmetic would otherwise take longer than `bound`.
    - A linear op's remote part is cut to the fewest SMs that do not slow the op by more than
      SM_GAIN.
    - Attention's remote part is cut to the SMs whose rings keep the link busy.
    - A remote part gets no SMs if the op is faster mixed: the local tier's SMs read the remote
      units among their own, which needs a link without a window.
    """
    units = [sum(of) for of in zip(*placement, strict=True)]
    if _is_tiled(op, profile, units):
        return many_rows_sms(op, units, compute, profile, remote)
    counts = [math.ceil(count / len(placement)) for count in units]  # mean per layer

    def seconds(sms: Sequence[int]) -> float:
        """Predicted seconds of a mean layer whose tiers are read by `sms`."""
        kernel, link = read_times(op, counts, sms, profile, remote)
        return predicted_time(op, max(kernel, compute), profile, link=link)

    sms, arithmetic = [], []
    for name, held in zip(remote, units[1:], strict=True):
        work = held / sum(units) * compute
        arithmetic.append(math.ceil(profile.sms * work / bound) if bound else 0)
        sms.append(max(profile.tier(name).sms, arithmetic[-1]) if held else 0)
    spare = 1 if units[0] else 0
    while sum(sms) > max(profile.sms - spare, len(sms)):
        sms[sms.index(max(sms))] -= 1
    if op.category == "linear" and units[0]:
        for tier, highest in enumerate(sms):
            options: dict[int, float] = {}
            for n in range(min(max(1, arithmetic[tier]), highest), highest + 1):
                given = [*sms[:tier], n, *sms[tier + 1 :]]
                options[n] = seconds((profile.sms - sum(given), *given))
            soonest = min(options.values())
            sms[tier] = min(n for n, took in options.items() if took <= soonest * SM_GAIN)
    if op.category == "attention" and units[0]:
        busy = [_attention_sms(profile.tier(name), profile) for name in remote]
        sms = [min(n, max(least)) for n, *least in zip(sms, arithmetic, busy, strict=True)]
    local = profile.sms - sum(sms) if units[0] else 0
    first = next((tier for tier, count in enumerate(counts) if tier and count), 0)
    many = op.category == "linear" and op.batch_size > FEW_ROWS
    separate = (local, *sms)
    if (
        not (first and counts[0])
        or many
        or is_windowed(profile.tier(remote[first - 1]), profile.card)
    ):
        return separate
    mixed = (local + sms[first - 1], *(0 if t == first else n for t, n in enumerate(sms, 1)))
    return mixed if seconds(mixed) < seconds(separate) else separate


def _attention_sms(tier: RemoteTier, profile: HardwareProfile) -> int:
    """SMs whose rings hold the bytes in flight that `tier`'s link needs; all with a window.

    Rings are those for long heads.
    """
    if is_windowed(tier, profile.card):
        return tier.sms
    needed = profile.kernel_model.attention_ring_factor * bytes_in_flight(tier, profile)
    return math.ceil(needed / profile.card.attention_ring_bytes)


def _is_tiled(op: Op, profile: HardwareProfile, counts: Sequence[int]) -> bool:
    """Whether `op`, with `counts` units in each tier, is modelled as a product of the tiled GEMM.

    So are torch's products, on a card without the tiled GEMM. False if the profile has no costs of
    many rows.
    """
    if op.category != "linear" or profile.many_rows is None:
        return False
    remote = any(counts[1:])
    by = kernel_for(
        op.batch_size, op.units, op.shape[1], remote=remote, card=profile.card,
        atom_bytes=op.atom_bytes,
    )  # fmt: skip
    return by != "splitk"


def launch_times(
    op: Op,
    counts: Sequence[int],
    sms: Sequence[int],
    compute: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[float, float]:
    """(kernel, link) seconds of a layer of `op` with `sms[t]` SMs for `counts[t]` units of tier t.

    The kernel seconds of the tiled GEMM include `compute` seconds of arithmetic; others do not.
    """
    if _is_tiled(op, profile, counts):
        return many_rows_times(op, counts, sms, compute, profile, remote)
    return read_times(op, counts, sms, profile, remote)


def read_times(
    op: Op,
    counts: Sequence[int],
    sms: Sequence[int],
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[float, float]:
    """(kernel, link) seconds in which `sms[t]` SMs read `counts[t]` units of tier t of one layer.

    A remote tier with units and no SMs is mixed: read by the local tier's SMs. Beyond the
    roofline this counts the local part's busiest CTA, the last wave of remote parts, which has
    fewer CTAs, and idle links between launches.
    """
    if profile.device != "cuda" or op.category == "gather":
        return 0.0, 0.0
    parts = list(zip(map(profile.tier, remote), counts[1:], sms[1:], strict=True))
    if op.category == "attention":
        return _attention_times(op.read_bytes / op.units, counts[0], sms[0], parts, profile)
    model, card = profile.kernel_model, profile.card
    # Mean bytes read of a row block, by tier: popular experts are not evenly spread over tiers.
    means = [op.read_bytes / op.units] * len(counts)
    if op.chances:
        reads = op.tier_reads(counts)
        means = [n / max(count, 1) for n, count in zip(reads, counts, strict=True)]
    mixed = sum(count for _, count, own in parts if not own)
    fixed = profile.linear.at(op.batch_size)[0]
    links = []
    for (tier, row_blocks, own), row_block in zip(parts, means[1:], strict=True):
        if not row_blocks:
            continue
        if own:
            ctas, group = (
                float(min(own, row_blocks)),
                _group(op, card, row_blocks, min(own, row_blocks), far=True),
            )
            seconds = row_block * _waves(op, row_blocks, own, card, _link_rate(tier, op, profile))
        else:
            ctas = sms[0] * row_blocks / (counts[0] + mixed)
            group = _group(op, card, counts[0], sms[0], mixed, far=True)
            seconds = _mixed_seconds(row_block * row_blocks, tier, model)
        # HBM idles between launches as well: that is part of the op's fixed cost.
        held = _ring_bytes(op, ctas, group, card) / tier.direct_bytes_per_s
        idle = max(0.0, model.launch_gap_seconds - held)
        links.append(seconds + max(0.0, idle - fixed))
    local = means[0] * counts[0] / profile.hbm_bytes_per_s
    local *= _unevenness(op, counts[0], sms[0], profile, mixed)
    return local, max(links, default=0.0)


def _attention_times(
    slot: float,
    slots: int,
    sms: int,
    parts: Sequence[tuple[RemoteTier, int, int]],
    profile: HardwareProfile,
) -> tuple[float, float]:
    """`read_times` of attention, whose CTAs get about as many blocks each, in short items.

    `slot` is in bytes; `sms` read the local `slots`. `parts` are the remote tiers, with the slots
    and the SMs of each.
    """
    model = profile.kernel_model
    local = slot * slots / profile.hbm_bytes_per_s
    ratio = sms / profile.sms
    others = max(0.0, model.busy_sms - ratio) * model.remote_attention_cost
    kernel = local * (1 + others) / min(1.0, ratio / model.saturating_sms) if local else 0.0
    links = [_mixed_seconds(slot * n, tier, model) for tier, n, own in parts if not own]
    return kernel, max(links, default=0.0)


def _mixed_seconds(nbytes: float, tier: RemoteTier, model: KernelModel) -> float:
    """Seconds in which local CTAs read `nbytes` of `tier` among their own."""
    return nbytes / (tier.direct_bytes_per_s * model.mixed_link_efficiency)


def _unevenness(
    op: Op, row_blocks: int, ctas: int, profile: HardwareProfile, mixed: int = 0
) -> float:
    """Time of `row_blocks` of `op` over `ctas`, as a multiple of HBM's time for their bytes.

    The CTAs also read `mixed` row blocks of another tier. The factor is 1 for a kernel on all SMs
    that is as even as the kernels with which the profile's op costs were measured.
    """
    if not row_blocks:
        return 1.0
    model = profile.kernel_model
    ctas = min(max(1, ctas), row_blocks + mixed)
    group = _group(op, profile.card, row_blocks, ctas, mixed, far=mixed > 0)
    busiest = group * ceil_div(group_count(group, row_blocks, mixed), ctas)
    over_mean = busiest * profile.sms / (row_blocks + mixed)
    return 1 + model.busiest_cta_weight * (over_mean - 1 / model.busy_sms)


def _group(op: Op, card: Card, row_blocks: int, ctas: int, mixed: int = 0, *, far: bool) -> int:
    """Row blocks of a group, as dakrun/launches/splitk.py chooses them; `far` behind a link."""
    sizes = group_sizes(op.units, card, op.atom_bytes, far=far)
    return even_group(row_blocks, ctas, mixed, sizes) if card.even_waves else max(sizes)


def _ring_bytes(op: Op, ctas: float, group: int, card: Card) -> float:
    """Bytes of W in the rings of `ctas`, which also hold the rows of X."""
    x = ATOM_BYTES * ceil_div(min(op.batch_size, SPLITK_MAX_ROWS), ROWS_PER_BLOCK)
    w = op.atom_bytes * group
    return ctas * card.ring_bytes * w / (w + x)


def _waves(
    op: Op, row_blocks: int, sms: int, card: Card, rate: Callable[[int, int], float]
) -> float:
    """Seconds in which a CTA per SM reads remote `row_blocks` of `op`, over a row block's bytes.

    `rate(ctas, group)` is in bytes/s, for that many CTAs and row blocks in a group. Only the last
    wave may have fewer CTAs.
    """
    if not row_blocks:
        return 0.0
    ctas = min(max(1, sms), row_blocks)
    group = _group(op, card, row_blocks, ctas, far=True)
    whole, last = divmod(ceil_div(row_blocks, group), ctas)
    rest = max(0, row_blocks - whole * ctas * group) if last else 0
    seconds = (row_blocks - rest) / rate(ctas, group)
    return seconds + (rest / rate(last, group) if rest else 0.0)


def _link_rate(tier: RemoteTier, op: Op, profile: HardwareProfile) -> Callable[[int, int], float]:
    """Bytes/s of `tier` by the CTAs that read W of `op` there and the row blocks in a group.

    The bytes in flight are limited by the CTAs' rings. A window reaches its full rate only with
    all of the tier's SMs.
    """
    full, needed = tier.direct_bytes_per_s, bytes_in_flight(tier, profile)
    windowed = is_windowed(tier, profile.card)
    loss = profile.kernel_model.few_sms_link_loss

    def rate(ctas: int, group: int) -> float:
        missing = max(0.0, 1 - ctas / tier.sms) if windowed else 0.0
        filled = min(1.0, _ring_bytes(op, ctas, group, profile.card) / needed)
        return full * filled / (1 + loss * 2 * missing)

    return rate
