"""The tensors of quantized weights in a checkpoint: checked, read once, and decoded.

Knows how a weight is stored (formats/), not files. A format with K first is read whole, and kept
while requests ask for rows of it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from dakrun.errors import CannotRun
from dakrun.formats import Malformed
from dakrun.formats.stored import SCALE_DTYPES, SCALES, Part
from dakrun.models.operands import Request, Source
from dakrun.weights.streaming import Extent, stream

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


def stream_decoded(
    requests: Sequence[Request], find: Find, device: torch.device
) -> Iterator[list[Decoded]]:
    """The rows of each request on `device`, as stored or decoded (see streaming.stream).

    Raises CannotRun for contents that a format does not allow.
    """
    left = Counter(source for request in requests for source, _ in request)
    kept: dict[Source, list[torch.Tensor]] = {}
    tensors = stream(_extents(requests, find), device)
    for request, loaded in zip(requests, tensors, strict=True):
        found: list[Decoded] = []
        here = iter(loaded)
        for source, rows in request:
            left[source] -= 1
            if not source.stored:
                found.append((next(here),))
                continue
            parts = kept.get(source) or _shaped(source, here, find)
            if source.stored.by_columns and left[source]:
                # A CPU's tensors last for one request.
                own = [part.clone() if part.device.type == "cpu" else part for part in parts]
                kept.setdefault(source, own)
            else:
                kept.pop(source, None)
            found.append(_decoded(source, rows, parts))
        yield found


def _extents(requests: Sequence[Request], find: Find) -> list[list[Extent]]:
    """The extents of each request: rows of plain tensors and of parts, each part once."""
    found, seen = [], set[Source]()
    for request in requests:
        needed: list[Extent] = []
        for source, rows in request:
            if not source.stored:
                plain = find(source, "")
                assert plain is not None, "the source was checked"
                needed.append(plain.rows(rows.start, rows.stop))
            elif not (source.stored.by_columns and source in seen):
                seen.add(source)
                needed += _part_extents(source, rows, find)
        found.append(needed)
    return found


def _part_extents(source: Source, rows: slice, find: Find) -> Iterator[Extent]:
    for part in parts_of(source):
        extent = find(source, part.suffix)
        if extent is not None:
            needed = part.needed(rows)
            yield extent if needed is None else extent.rows(needed.start, needed.stop)


def _shaped(source: Source, tensors: Iterator[torch.Tensor], find: Find) -> list[torch.Tensor]:
    """The parts of a weight, in the shapes of its format; empty where they are missing."""
    found = []
    for part in parts_of(source):
        if find(source, part.suffix) is None:
            found.append(torch.empty(0))
            continue
        tensor = next(tensors)
        rows = part.shape[:1] if part.rows == 0 else (-1,)
        found.append(tensor.reshape(*rows, *part.shape[1:]))
    return found


def _decoded(source: Source, rows: slice, parts: list[torch.Tensor]) -> Decoded:
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
