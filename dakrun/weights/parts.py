"""The tensors of a quantized weight in a checkpoint: checked, found and decoded.

Knows how a weight is stored (formats/), not files.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from dakrun.errors import CannotRun
from dakrun.formats import Malformed
from dakrun.formats.stored import SCALE_DTYPES, SCALES, Part
from dakrun.models.operands import Source
from dakrun.weights.streaming import Extent

Decoded = tuple[torch.Tensor, ...]  # rows [R, K]; of a quantized weight what its layout writes
Find = Callable[[Source, str], Extent | None]  # a tensor by its suffix; "" for a plain one


def parts_of(source: Source) -> Sequence[Part]:
    """The tensors of a quantized weight."""
    assert source.stored, f"{source.name} is not quantized"
    return source.stored.parts(*source.shape)  # type: ignore[arg-type]


def check_parts(
    source: Source, find: Callable[[Source, str], tuple[str, Extent | None]], directory: str
) -> None:
    """Raise CannotRun unless a quantized weight has its tensors, in their shapes and dtypes.

    `find` gives the stored dtype's name and the extent of a tensor; no name if it is missing.
    """
    assert source.stored and source.layout
    for part in parts_of(source):
        stored, extent = find(source, part.suffix)
        name = source.name.removesuffix("weight") + part.suffix
        wrong = ""
        if not stored:
            if not part.optional:
                raise CannotRun(
                    f"{directory}: tensor {name} is missing: config.json says {source.stored.name}",
                    hint="copy the checkpoint again, config.json and all safetensors files",
                )
        elif extent is None or stored not in part.dtypes:
            wrong = f"is stored as {stored}, not as {' or '.join(part.dtypes)}"
        elif [n for n in extent.shape if n > 1] != [n for n in part.shape if n > 1]:
            shapes = ("x".join(map(str, of)) for of in (extent.shape, source.shape, part.shape))
            wrong = "is {}, {name} of {} has {}".format(*shapes, name=source.stored.name)
        elif (
            part.dtypes == SCALES
            and source.layout.scale_bytes == 2
            and SCALE_DTYPES[stored] != source.stored.scale_dtype
        ):
            wrong = f"is stored as {stored}, other scales as {source.stored.scale_dtype}"
        if wrong:
            raise CannotRun(
                f"{directory}: tensor {name} {wrong}",
                hint="config.json and the safetensors files do not belong together",
            )


def part_extents(source: Source, rows: slice, find: Find) -> Iterator[Extent]:
    """What to read of the tensors of a quantized weight for `rows` of it."""
    for part in parts_of(source):
        extent = find(source, part.suffix)
        if extent is not None:
            needed = part.needed(rows)
            yield extent if needed is None else extent.rows(needed.start, needed.stop)


def shaped(source: Source, tensors: Iterator[torch.Tensor], find: Find) -> list[torch.Tensor]:
    """The next of `tensors` as the tensors of a quantized weight; empty where they are missing."""
    found = []
    for part in parts_of(source):
        if find(source, part.suffix) is None:
            found.append(torch.empty(0))
            continue
        tensor = next(tensors)
        rows = part.shape[:1] if part.rows == 0 else (-1,)
        found.append(tensor.reshape(*rows, *part.shape[1:]))
    return found


def decoded(source: Source, rows: slice, parts: list[torch.Tensor]) -> Decoded:
    """`rows` of a quantized weight. Raises CannotRun for contents that no format allows."""
    assert source.stored and source.layout
    try:
        stored = source.stored.decode(parts, rows, source.shape[1], source.layout)
        scales = stored[1] if source.layout.scale_bytes > 1 else stored[2]
        if not bool(scales.isfinite().all()):
            raise Malformed("a scale is NaN or infinite")
    except Malformed as problem:
        raise CannotRun(
            f"{source.name} cannot be read as {source.stored.name}: {problem}",
            hint="copy the checkpoint again, or take another one",
        ) from None
    return stored
