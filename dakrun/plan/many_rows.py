"""CTA model of the tiled GEMM: SMs for each tier's part of a product of many rows, and its time.

Asks dakrun/launches for the rings of the tiled GEMM's CTAs. Knows one op's placement.
"""

import bisect
import functools
from collections.abc import Sequence

from dakrun.geometry import TILED_MAX_ROWS
from dakrun.hardware import Card, HardwareProfile
from dakrun.launches import Launch, TierAccess, shapes, tiled_config
from dakrun.plan.ops import Op
from dakrun.plan.roofline import bytes_in_flight, kernel_compute_time
from dakrun.units import ceil_div


def many_rows_times(
    op: Op,
    counts: Sequence[float],
    sms: Sequence[int],
    compute: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[float, float]:
    """(kernel, link) seconds of one layer of a product of many rows, its parts side by side.

    `sms[t]` SMs multiply `counts[t]` row blocks of tier t. All SMs together would take `compute`
    seconds for the whole op. HBM limits the local part. A remote part is limited by the bytes of W
    in its CTAs' rings, and its link idles for a while between launches. Without clusters it crosses
    the link once for each tile of X.
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
    """(kernel, link) seconds of the part in tier number `tier`, 0 being the local one."""
    nbytes, work = op.read_bytes / op.units * row_blocks, compute * row_blocks / op.units
    kernel = work * profile.sms / sms
    if tier == 0:
        return max(kernel, nbytes / profile.hbm_bytes_per_s), 0.0
    link, card, rows = profile.tier(remote[tier - 1]), profile.card, op.batch_size
    gap = profile.kernel_model.launch_gap_seconds
    if not shapes(card, atom_bytes=op.atom_bytes):  # torch multiplies unpacked pieces of W
        return kernel, nbytes / link.direct_bytes_per_s + gap
    launch = _remote_launch(
        min(rows, TILED_MAX_ROWS), op.units, op.shape[1], link.window_bytes, card, op.atom_bytes
    )
    # CTAs of a cluster along X load the stages of one ring in turn.
    held = sms * launch.held_bytes / launch.shape.x_ctas
    rate = link.direct_bytes_per_s * min(1.0, held / bytes_in_flight(link, profile))
    reads = (
        ceil_div(rows, launch.shape.rows) if rows <= card.tiled_rows and not card.clusters else 1
    )
    return kernel, nbytes * reads / rate + gap


def many_rows_sms(
    op: Op,
    counts: Sequence[int],
    compute: float,
    profile: HardwareProfile,
    remote: Sequence[str],
) -> tuple[int, ...]:
    """SMs for each tier's part of a product of many rows; `counts` are row blocks of all layers.

    A remote part gets the fewest SMs with which it ends before the local part or is limited by
    its link, or one fewer if the op is faster with that. The kernel rounds the result to whole
    clusters and tiles (RemotePart in dakrun/launches/tiled.py).
    """
    layer = [n * op.units / sum(counts) for n in counts]
    sms = [int(n > 0) for n in counts]
    tiers = [tier for tier, n in enumerate(counts) if tier and n]
    inefficiency = kernel_compute_time(op, 1.0, profile)

    def with_sms(tier: int, count: int) -> list[int]:
        """SMs per tier with `count` for one remote tier; the local one gets the rest."""
        found = [*sms[:tier], count, *sms[tier + 1 :]]
        return [profile.sms - sum(found[1:]) if counts[0] else 0, *found[1:]]

    def seconds(tier: int, split: Sequence[int]) -> float:
        """Seconds of one tier's part with SMs per tier `split`."""
        if not layer[tier]:
            return 0.0
        kernel, link = _part_times(op, tier, layer[tier], split[tier], compute, profile, remote)
        return max(kernel * inefficiency, link)

    # With several remote tiers, a second pass: the first one did not know the others' SMs.
    for tier in tiers * min(2, len(tiers)):
        highest = profile.sms - sum(sms[1:]) + sms[tier] - int(counts[0] > 0)
        soonest = seconds(tier, with_sms(tier, highest)) * (1 + 1e-9)

        def suffices(count: int, tier: int = tier, soonest: float = soonest) -> bool:
            split = with_sms(tier, count)
            part = seconds(tier, split)
            return part <= soonest or part <= seconds(0, split)

        fewest = min(highest, 1 + bisect.bisect_left(range(1, highest + 1), True, key=suffices))
        options = {count: with_sms(tier, count) for count in sorted({max(1, fewest - 1), fewest})}
        sms[tier] = min(
            options, key=lambda count: max(seconds(t, options[count]) for t in range(len(sms)))
        )
    return tuple(with_sms(tiers[0], sms[tiers[0]])) if tiers else (profile.sms, *sms[1:])


@functools.cache
def _remote_launch(
    rows: int, row_blocks: int, cols: int, window: int, card: Card, atom_bytes: int
) -> Launch:
    """The launch for `rows` of X and a W whose `row_blocks` all lie behind a link with `window`.

    An atom of W has `atom_bytes`. A launch for a part of W may have other tiles; on few SMs its
    tiles are whole, so stages should be counted for whole tiles.
    """
    access = TierAccess(), TierAccess(window_bytes=window)
    (launch,) = tiled_config(
        rows, (0, row_blocks), access, cols=cols, card=card, atom_bytes=atom_bytes
    ).launches
    return launch
