"""Products of many rows with a part of the weight in remote tiers: SMs for each part, and the time.

Knows the tiled GEMM's rings, and no placements but one op's.
"""

import bisect
from collections.abc import Sequence

from dakrun.geometry import ATOM_BYTES, ROWS_PER_BLOCK, TILE_ROW_BLOCKS, TILED_MAX_STAGES
from dakrun.hardware import HardwareProfile, RemoteTier
from dakrun.plan.in_flight import bytes_needed
from dakrun.plan.ops import Op
from dakrun.plan.roofline import kernel_time
from dakrun.units import ceil_div

# Of a CTA's ring, whose stages have an atom for each row block of W and for every 8 rows of X: the
# most rows of X, and the bytes of all stages.
TILE_ROWS = 512
RING_BYTES = 210 * 1024


def many_rows_times(
    op: Op,
    counts: Sequence[float],
    sms: Sequence[int],
    compute: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[float, float]:
    """(kernel, link) seconds of one layer of a product of many rows, part beside part.

    `sms[t]` SMs take their share of the arithmetic, which takes all of them `compute` seconds, for
    `counts[t]` row blocks of each tier t, and HBM has to give the local ones. Links are as fast as
    the rings of so many CTAs allow.
    """
    parts = [
        _part_times(op, tier, n, s, compute, profile, remote)
        for tier, (n, s) in enumerate(zip(counts, sms, strict=True))
        if n
    ]
    kernel, link = zip(*parts, strict=True)
    return max(kernel), max(link)


def _part_times(
    op: Op,
    tier: int,
    row_blocks: float,
    sms: int,
    compute: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[float, float]:
    """(kernel, link) seconds of the part in one tier, the local one being 0."""
    nbytes, work = op.read_bytes / op.units * row_blocks, compute * row_blocks / op.units
    kernel = work * profile.sms / sms
    if tier == 0:
        return max(kernel, nbytes / profile.hbm_bytes_per_s), 0.0
    return kernel, nbytes / _ring_rate(profile.tier(remote[tier - 1]), op.batch_size, sms)


def many_rows_sms(
    op: Op,
    counts: Sequence[int],
    compute: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[int, ...]:
    """SMs for each tier's part of a product of many rows; `counts` are row blocks of all layers.

    The kernel makes its own choice, of whole clusters and tiles (kernels/tiled_remote.py), near
    this one. Here a remote part gets the fewest with which it ends before the local one, or no
    later than its link allows, or one less where that is sooner.
    """
    layer = [n * op.units / sum(counts) for n in counts]
    sms = [int(n > 0) for n in counts]
    tiers = [tier for tier, n in enumerate(counts) if tier and n]
    inefficiency = kernel_time(op, 1.0, profile)

    def given(tier: int, count: int) -> list[int]:
        found = [*sms[:tier], count, *sms[tier + 1 :]]
        return [profile.sms - sum(found[1:]) if counts[0] else 0, *found[1:]]

    def seconds(number: int, dealt: Sequence[int]) -> float:
        """Of the part in one tier, with `dealt` SMs for each tier's."""
        if not layer[number]:
            return 0.0
        kernel, link = _part_times(
            op, number, layer[number], dealt[number], compute, profile, remote
        )
        return max(kernel * inefficiency, link)

    for tier in tiers * min(2, len(tiers)):  # the second time knowing of the others
        most = profile.sms - sum(sms[1:]) + sms[tier] - int(counts[0] > 0)

        best = seconds(tier, given(tier, most)) * (1 + 1e-9)  # with what its link allows

        def ends(count: int, tier: int = tier, best: float = best) -> bool:
            dealt = given(tier, count)
            part = seconds(tier, dealt)
            return part <= best or part <= seconds(0, dealt)

        enough = min(most, 1 + bisect.bisect_left(range(1, most + 1), True, key=ends))
        options = {count: given(tier, count) for count in sorted({max(1, enough - 1), enough})}
        sms[tier] = min(
            options, key=lambda count: max(seconds(t, options[count]) for t in range(len(sms)))
        )
    return tuple(given(tiers[0], sms[tiers[0]])) if tiers else (profile.sms, *sms[1:])


def ring_stages(rows: int) -> int:
    """Stages of a CTA's ring that reads a remote part: of 64 rows of W and all of X, up to 512."""
    across = ceil_div(min(rows, TILE_ROWS), ROWS_PER_BLOCK)
    return min(TILED_MAX_STAGES, RING_BYTES // (ATOM_BYTES * (TILE_ROW_BLOCKS + across)))


def _ring_rate(tier: RemoteTier, rows: int, ctas: int) -> float:
    """Bytes/s of `tier` where `ctas` CTAs of a product of many rows read it."""
    held = ctas * ring_stages(rows) * ATOM_BYTES * TILE_ROW_BLOCKS
    return tier.direct_bytes_per_s * min(1.0, held / bytes_needed(tier))
