"""Launch configurations of the grouped tiled GEMM: experts' products with rows sorted by expert.

Pure functions of shapes, row blocks per tier and card, as tiled.py has them for one matrix.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from dakrun.geometry import ATOM_BYTES, WARPGROUPS, unit_atoms
from dakrun.hardware import Card
from dakrun.launches.tiers import TierAccess
from dakrun.launches.tiled_shapes import Launch, Shape, TierTiles, sharing_tiles, x_tiles
from dakrun.units import ceil_div

TALL_TILES = 40  # of 8 rows of X: with more, accumulators leave too few registers
DEVIATIONS = 2  # of an expert's rows from the mean that a tile is to hold


@functools.cache
def grouped_shapes(card: Card, atom_bytes: int = ATOM_BYTES) -> tuple[Shape, ...]:
    """Shapes for atoms of `atom_bytes`, that of few rows of X first; none if the rings do not fit.

    A tall tile multiplies as many rows of X as it has, and has those of a whole expert nearly
    always: then W is read once.
    """
    units = unit_atoms(atom_bytes) > 1
    per_sm = 2 if sharing_tiles(wgmma=card.has_wgmma, units=units) else 1
    narrow = Shape(min(x_tiles(wgmma=card.has_wgmma)), WARPGROUPS, ctas_per_sm=per_sm)
    tall = [Shape(TALL_TILES, WARPGROUPS)] if card.has_wgmma and not units else []
    found = (replace(shape, atom_bytes=atom_bytes) for shape in (narrow, *tall))
    return tuple(shape for shape in found if shape.fits(shape.places(card)))


def grouped_launch(
    pairs: int,
    experts: int,
    row_blocks: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    card: Card,
    atom_bytes: int = ATOM_BYTES,
) -> Launch:
    """Choose the launch for `pairs` rows of X, and `row_blocks` of all experts in each tier.

    The local tier comes first. A narrow tile is chosen if it holds all rows of nearly all experts,
    where rows choose experts at random: then W is read once. A remote tier has the SMs of its
    `tiers`, or SMs by its row blocks; fewer if stages of fewer CTAs fill its window. With units a
    tier that has both has up to two CTAs for each of its SMs, but no more than by its row blocks:
    the ring of a CTA has few units (TILED_UNIT_STAGES), which are expanded before others take their
    place, so that a CTA keeps less in flight.
    Raises ValueError if there is nothing to multiply, or no room for the rings.
    """
    shapes, total = grouped_shapes(card, atom_bytes), sum(row_blocks)
    if not shapes or pairs < 1 or total < 1:
        raise ValueError(f"no tiles for {pairs} rows, {total} row blocks of {atom_bytes} bytes")
    mean = pairs / experts
    most = mean + DEVIATIONS * math.sqrt(mean)
    shape = next((shape for shape in shapes if shape.rows >= most), shapes[-1])
    expert_row_blocks = total // experts
    size = ceil_div(expert_row_blocks, ceil_div(expert_row_blocks, shape.row_blocks))
    card, each = shape.places(card), 2 if shape.has_units else 1
    stages = shape.stages(card, size)
    copies, stage_bytes = shape.copies(stages), shape.copy_bytes * size
    clusters = _clusters(row_blocks, tiers, stage_bytes, card.sms, each)
    tiles = (
        TierTiles(count, size, window=access.closest(count * stage_bytes, copies))
        for count, access in zip(clusters, tiers, strict=True)
    )
    return Launch(shape, stages, tuple(tiles)).with_max_blocks(card)


def _clusters(
    row_blocks: Sequence[int], tiers: Sequence[TierAccess], stage_bytes: int, sms: int, each: int
) -> list[int]:
    """Clusters of each tier, single CTAs; at least one where a tier has row blocks.

    A remote tier with a window has up to `each` of them for each of its SMs.
    """
    total, found = sum(row_blocks), list[int]()
    for count, access in zip(row_blocks[1:], tiers[1:], strict=True):
        by_row_blocks = max(1, sms * count // total)
        most = access.sms or by_row_blocks
        if access.sms and access.window_bytes:
            most = max(most, min(each * most, by_row_blocks))
        found.append(min(count, access.closest(stage_bytes, most)))
    while sum(found) > sms - (row_blocks[0] > 0) and max(found) > 1:
        found[found.index(max(found))] -= 1
    return [sms - sum(found) if row_blocks[0] else 0, *found]
