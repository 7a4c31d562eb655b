"""The order of row blocks in a tier: groups and waves of CTAs, and steps of columns.

A tier's row blocks, of 8 rows, are assigned round-robin to its CTAs, in groups of up to 16 that a
CTA computes together: CTA c takes the groups c, c + CTAs, ... A wave is one group for each CTA. A
wave is stored as [steps of columns][groups][atoms along the columns][row blocks], so that CTAs side
by side read memory side by side. An atom is 64 columns of a row block; the format says how an atom
is stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dakrun.geometry import ATOM_COLS, MAX_GROUP_ROW_BLOCKS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Split:
    """How a tier's `row_blocks` are assigned to `ctas`: round-robin, `group` row blocks at a time.

    The last group may be smaller. `step_cols` columns of a group, a multiple of 64, lie together.
    If `mixed`, the row blocks are stored like this but computed by the local tier's CTAs, which
    take the groups of both tiers. By default there is one CTA, and row blocks follow each other.

    A matrix may stack others of `height` row blocks each, such as experts. Groups then begin anew
    with each stacked matrix, so each lies in one piece, stored alike in every tier. The tier lacks
    the first `cut` row blocks of its first stacked matrix. `ctas` is 1.
    """

    row_blocks: int
    ctas: int = 1
    group: int = 1
    step_cols: int = ATOM_COLS
    mixed: bool = False
    height: int = 0
    cut: int = 0

    def __post_init__(self) -> None:
        if (
            not 1 <= self.group <= MAX_GROUP_ROW_BLOCKS
            or self.step_cols % ATOM_COLS
            or self.step_cols < 1
        ):
            raise ValueError(
                f"expected groups of 1 to {MAX_GROUP_ROW_BLOCKS} row blocks and steps of a "
                f"multiple of {ATOM_COLS} columns, got {self}"
            )
        if self.row_blocks and self.ctas < 1:
            raise ValueError(f"expected at least one CTA, got {self}")
        if self.height and (self.ctas != 1 or not 0 <= self.cut < self.height):
            raise ValueError(f"expected one CTA and a part of a matrix, got {self}")

    @property
    def wave(self) -> int:
        """Row blocks of a wave: one group for each CTA."""
        return max(1, self.ctas * self.group)

    def sections(self) -> "Iterator[tuple[int, Split]]":
        """Row blocks that are stored one after the other: the first of each, and its own split.

        A tier may begin inside a group: first comes the rest of this group, then the rest of its
        stacked matrix, then the other stacked matrices, in one section where groups divide them.
        """
        first, at, height = 0, self.cut, self.height  # `at` is in its matrix
        while first < self.row_blocks:
            count = self.row_blocks - first
            if at % self.group:
                count = min(count, self.group - at % self.group, height - at)
            elif height % self.group:
                count = min(count, height - at)
            yield first, replace(self, row_blocks=count, height=0, cut=0)
            first, at = first + count, (at + count) % (height or self.row_blocks)


def stretches(split: Split, limit: int) -> Iterator[tuple[int, int]]:
    """Divide a tier's row blocks into pieces (first, count) that can be stored one by one.

    A piece is whole waves, or whole groups of one wave where a wave exceeds `limit`; it has up to
    `limit` row blocks, but one group at least.
    """
    for top, section in split.sections():
        for first, count in _stretches(section, limit):
            yield top + first, count


def _stretches(split: Split, limit: int) -> Iterator[tuple[int, int]]:
    """The stretches of a section."""
    limit, first = max(1, limit // split.group) * split.group, 0
    while first < split.row_blocks:
        left, skipped = split.row_blocks - first, first % split.wave
        count = min(limit, left, split.wave - skipped)
        if count == split.wave:
            count = min(limit, left) // split.wave * split.wave
        yield first, count
        first += count


def store_atoms(
    data: "torch.Tensor",
    split: Split,
    first: int,
    atoms: "torch.Tensor",
    atom_cols: int = ATOM_COLS,
) -> None:
    """Store atoms [columns, row blocks, W] in the bytes `data` of a tier.

    Their row blocks are one of `stretches`, from row block `first` on. An atom is W elements of any
    dtype. Units are stored likewise, with their columns as `atom_cols`.
    """
    for stored, of in _matching_views(data, split, first, atoms, atom_cols):
        stored.copy_(of)


def load_atoms(
    data: "torch.Tensor", split: Split, like: "torch.Tensor", atom_cols: int = ATOM_COLS
) -> "torch.Tensor":
    """The atoms, or units, [columns, row blocks, W] of a tier's bytes `data`.

    `like` [columns, 0, W] gives their dtype and the sizes.
    """
    import torch

    pieces = [like]
    for first, count in stretches(split, split.row_blocks):
        atoms = like.new_empty(like.shape[0], count, like.shape[2])
        for stored, to in _matching_views(data, split, first, atoms, atom_cols):
            to.copy_(stored)
        pieces.append(atoms)
    return torch.cat(pieces, 1)


def _matching_views(
    data: "torch.Tensor", split: Split, first: int, atoms: "torch.Tensor", atom_cols: int
) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    """Pairs of views: a range of a tier's bytes, and the atoms that are stored there.

    Both are [waves, steps, groups, columns of a step, row blocks of a group, W].
    """
    columns, row_blocks, width = atoms.shape
    top, split = next(of for of in reversed([*split.sections()]) if of[0] <= first)
    data = data.view(atoms.dtype)[top * columns * width :]
    first -= top
    skipped, waves = first % split.wave, max(1, row_blocks // split.wave)
    wave, here = min(split.wave, split.row_blocks - first + skipped), row_blocks // waves
    words = data[(first - skipped) * columns * width :]
    words = words[: waves * wave * columns * width].view(waves, -1)
    atoms = atoms.view(columns, waves, here, width)
    for column, steps, depth in _runs(columns, max(1, split.step_cols // atom_cols)):
        step = words[:, column * wave * width : (column + steps * depth) * wave * width]
        step = step.view(waves, steps, -1)
        some = atoms[column : column + steps * depth]
        for row_block, groups, size in _runs(here, split.group):
            start, end = skipped + row_block, skipped + row_block + groups * size
            stored = step[..., start * depth * width : end * depth * width]
            of = some[:, :, row_block : row_block + groups * size]
            of = of.view(steps, depth, waves, groups, size, width).permute(2, 0, 3, 1, 4, 5)
            yield stored.view(waves, steps, groups, depth, size, width), of


def _runs(count: int, size: int) -> list[tuple[int, int, int]]:
    """Divide `count` into pieces of `size` and a rest: runs (first, pieces, size of each)."""
    whole, rest = divmod(count, size)
    runs = ((0, whole, size), (whole * size, 1, rest))
    return [(first, pieces, each) for first, pieces, each in runs if pieces * each]
