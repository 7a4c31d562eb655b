"""Launch configurations of the grouped tiled GEMM: experts' products with rows sorted by expert.

Pure functions of shapes, row blocks per tier and card, as tiled.py has them for one matrix.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from dakrun.geometry import ATOM_BYTES, TILED_TALL_SIZES, WARPGROUPS, unit_atoms
from dakrun.hardware import Card
from dakrun.launches.tiers import TierAccess
from dakrun.launches.tiled_shapes import Launch, Shape, TierTiles, sharing_tiles, x_tiles
from dakrun.units import ceil_div

DEVIATIONS = 3  # of an expert's rows from the mean that a tile is to hold


def grouped_shape(card: Card, atom_bytes: int = ATOM_BYTES) -> Shape | None:
    """The shape for atoms of `atom_bytes`, with room for as many rows of X as a tile can have.

    None if no ring fits.
    """
    shapes = _shapes(card, atom_bytes)
    return shapes[-1] if shapes else None


@functools.cache
def _shapes(card: Card, atom_bytes: int) -> tuple[Shape, ...]:
    """Shapes whose rings fit, that with the fewest rows of X first.

    With wgmma and in 16 bits they are tall, and differ in their room: a tile multiplies as many
    rows of X as it has, nearly always those of a whole expert, so that W is read once.
    """
    units = unit_atoms(atom_bytes) > 1
    if card.has_wgmma and not units:
        tall = Shape(max(TILED_TALL_SIZES), WARPGROUPS)
        shapes = [replace(tall, room=tiles) for tiles in TILED_TALL_SIZES]
    else:
        per_sm = 2 if sharing_tiles(wgmma=card.has_wgmma, units=units) else 1
        tiles = min(x_tiles(wgmma=card.has_wgmma))
        shapes = [Shape(tiles, WARPGROUPS, atom_bytes=atom_bytes, ctas_per_sm=per_sm)]
    return tuple(shape for shape in shapes if shape.fits(shape.places(card)))


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

    The local tier comes first. A tall tile has room for the rows of nearly every expert, where rows
    choose experts at random, but hardly for more: the less room, the more stages fit, and the more
    of W is in flight. A remote tier has the SMs of its `tiers`, or SMs by its row blocks; fewer if
    stages of fewer CTAs fill its window. With units a tier that has both has up to two CTAs for
    each of its SMs, but no more than by its row blocks: the ring of a CTA has few units
    (TILED_UNIT_STAGES), which are expanded before others take their place, so that a CTA keeps less
    in flight.
    Raises ValueError if there is nothing to multiply, or no room for the rings.
    """
    shapes, total = _shapes(card, atom_bytes), sum(row_blocks)
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
