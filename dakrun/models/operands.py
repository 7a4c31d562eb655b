"""The operands of a model's modules: which rows of which tensors of a checkpoint each is made of.

Knows names, shapes and the order of rows; knows neither what an operand is for nor files.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dakrun.formats import Quantised, Stored


class Source(NamedTuple):
    """A tensor of a checkpoint. Some checkpoints leave out the leading "model." of all names.

    A quantised weight is `stored` in several tensors, whose names begin like `name`, and has a
    `layout` on the device.
    """

    name: str
    shape: tuple[int, ...]
    stored: Stored | None = None
    layout: Quantised | None = None


Request = Sequence[tuple[Source, slice]]  # rows of several tensors


@dataclass(frozen=True)
class Scope:
    """A part of a model: its tensors' names in a checkpoint begin with `prefix`.

    `layer` is the number of its layer, None outside the layers.
    """

    prefix: str
    layer: int | None = None

    def name(self, name: str) -> str:
        """The operand's name in the whole model, such as "layers.3.qkv" or "lm_head"."""
        return name if self.layer is None else f"layers.{self.layer}.{name}"

    def sources(self, modules: Mapping[str, int], kind: str, *cols: int) -> tuple[Source, ...]:
        """The "weight" or the "bias" (`kind`) of each module; `modules` has their rows by name."""
        return tuple(
            Source(f"{self.prefix}{module}.{kind}", (rows, *cols))
            for module, rows in modules.items()
        )


class HeadOrder(NamedTuple):
    """The order in which kernels need the rows of heads of which RoPE rotates a part.

    They rotate row i of a head with row i + D / 2. Of the D = `size` rows only the first R =
    `rotated` are, i with i + R / 2. So their halves begin the halves of the head, and the other
    rows follow them. The order is that of the first `rows` rows of an operand.
    """

    rows: int
    size: int
    rotated: int

    def runs(self, rows: slice) -> Iterator[slice]:
        """The rows of the checkpoint, in runs, that `rows` in the order for kernels are."""
        half, own = self.size // 2, self.rotated // 2
        row = rows.start
        while row < min(rows.stop, self.rows):
            within, head = row % self.size, row - row % self.size
            second, offset = divmod(within, half)
            if offset < own:
                first, left = offset + second * own, own - offset
            else:
                first, left = offset + own + second * (half - own), half - offset
            stop = min(row + left, rows.stop)
            yield slice(head + first, head + first + stop - row)
            row = stop
        if row < rows.stop:
            yield slice(row, rows.stop)


class Operand:
    """Tensors of a checkpoint, stacked along dimension 0, that a step reads under one name.

    If `interleaved`, kernels need the rows of two tensors, or of the two halves of a single one,
    to alternate. An operand that is no Matrix always lies in the local tier, in float32 if `wide`.
    A checkpoint may have the tensor `joined` in offset of all `sources` (see in_checkpoint).
    Kernels need the rows of heads in the order `heads`, if it is given.
    """

    heads: HeadOrder | None = None

    def __init__(
        self,
        name: str,
        sources: tuple[Source, ...],
        *,
        interleaved: bool = False,
        wide: bool = False,
        joined: Source | None = None,
    ) -> None:
        self.name, self.sources, self.interleaved = name, sources, interleaved
        self.wide, self.joined = wide, joined
        _, *cols = sources[0].shape
        self.shape = (sum(source.shape[0] for source in sources), *cols)

    def request(self, rows: slice, *, for_kernels: bool) -> Request:
        """Rows of the sources that make up `rows` of the operand, for kernels or for plain torch.

        `rows` starts with a row block, and stops at the end of a row block or of the operand.
        """
        if self.heads and for_kernels:
            return [part for run in self.heads.runs(rows) for part in self._request(run, 1)]
        return self._request(rows, 2 if self.interleaved and for_kernels else 1)

    def _request(self, rows: slice, together: int) -> Request:
        """Rows of the sources that make up `rows`; those of `together` sources alternate."""
        halves = len(self.sources) < together
        ends = self._ends[together - 1 :: together] if not halves else self._ends
        number, found = bisect.bisect_right(ends, rows.start), []
        top = ends[number - 1] if number else 0
        while number < len(ends) and max(top, rows.start) < rows.stop:
            height = ends[number] - top
            start, stop = (min(max(row - top, 0), height) for row in (rows.start, rows.stop))
            group = self.sources[number * together : (number + 1) * together]
            firsts = [(group[0], 0), (group[0], height // 2)] if halves else [(s, 0) for s in group]
            found += [
                (source, slice(first + start // together, first + stop // together))
                for source, first in firsts
            ]
            number, top = number + 1, ends[number]
        return found

    def in_checkpoint(self) -> Sequence[Source]:
        """The sources in the order in which `joined` has their rows."""
        return self.sources

    @functools.cached_property
    def _ends(self) -> list[int]:
        """The row behind the last one of each source; a checkpoint may have many thousands."""
        return [*itertools.accumulate(source.shape[0] for source in self.sources)]
