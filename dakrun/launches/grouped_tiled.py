"""Launch configurations of the grouped tiled GEMM: experts' products with rows sorted by expert.

Pure functions of shapes, row blocks per tier and card, as tiled.py has them for one matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from dakrun.geometry import ATOM_BYTES, WARPGROUPS, unit_atoms
from dakrun.hardware import Card
from dakrun.launches.tiers import TierAccess
from dakrun.launches.tiled_shapes import Launch, Shape, TierTiles, x_tiles
from dakrun.units import ceil_div

TALL_TILES = 40  # of 8 rows of X: with more, accumulators leave too few registers
DEVIATIONS = 2  # of an expert's rows from the mean that a tile is to hold


def grouped_shapes(card: Card, atom_bytes: int = ATOM_BYTES) -> tuple[Shape, ...]:
    """Shapes for atoms of `atom_bytes`, that of few rows of X first; none if the rings do not fit.

    A tall tile multiplies as many rows of X as it has, and has those of a whole expert nearly
    always: then W is read once.
    """
    units = unit_atoms(atom_bytes) > 1
    narrow = Shape(min(x_tiles(wgmma=card.has_wgmma)), WARPGROUPS)
    tall = [Shape(TALL_TILES, WARPGROUPS)] if card.has_wgmma and not units else []
    found = (replace(shape, atom_bytes=atom_bytes) for shape in (narrow, *tall))
    return tuple(shape for shape in found if shape.fits(card))


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
    `tiers`, or SMs by its row blocks; fewer if whole stages then fill more of its window.
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
    stages = shape.stages(card, size)
    copies, stage_bytes = shape.copies(stages), shape.copy_bytes * size
    clusters = _clusters(row_blocks, tiers, copies, stage_bytes, card.sms)
    tiles = (
        TierTiles(count, size, window=_window(count, access, copies, stage_bytes))
        for count, access in zip(clusters, tiers, strict=True)
    )
    return Launch(shape, stages, tuple(tiles)).with_max_blocks(card)


def _clusters(
    row_blocks: Sequence[int],
    tiers: Sequence[TierAccess],
    copies: int,
    stage_bytes: int,
    sms: int,
) -> list[int]:
    """Clusters of each tier, single CTAs; at least one where a tier has row blocks."""
    total, found = sum(row_blocks), list[int]()
    for count, access in zip(row_blocks[1:], tiers[1:], strict=True):
        most = min(count, max(1, access.sms or sms * count // total))
        in_flight = {n: n * _window(n, access, copies, stage_bytes) for n in range(1, most + 1)}
        if access.window_bytes is not None:
            room = max(1, access.window_bytes // stage_bytes)
            in_flight = {n: stages for n, stages in in_flight.items() if stages <= room}
            most = max(in_flight, key=lambda n: (in_flight[n], n), default=0)
        found.append(most)
    while sum(found) > sms - (row_blocks[0] > 0) and max(found) > 1:
        found[found.index(max(found))] -= 1
    return [sms - sum(found) if row_blocks[0] else 0, *found]


def _window(clusters: int, access: TierAccess, copies: int, stage_bytes: int) -> int:
    """Stages, of up to `copies`, for which a tier's window has room in each of its `clusters`."""
    if access.window_bytes is None or not clusters:
        return copies
    return max(1, min(copies, access.window_bytes // (stage_bytes * clusters)))
