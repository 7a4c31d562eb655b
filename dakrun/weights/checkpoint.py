"""Safetensors checkpoints: open files, checked against a model and read row by row.

Knows files, tensor names and shapes, not what the tensors are for.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dakrun.config import ModelConfig
from dakrun.errors import CannotRun
from dakrun.models.decoder import Decoder
from dakrun.models.files import HEAD, read_header
from dakrun.models.folders import weight_files
from dakrun.models.operands import Operand, Request, Source
from dakrun.weights.mismatch import CHANGING, QUANTIZED, expert_hint, missing
from dakrun.weights.parts import (
    Decoded,
    check_parts,
    decoded,
    part_extents,
    parts_of,
    shaped,
)
from dakrun.weights.streaming import Extent, read, stream

FLOATS = {  # by safetensors' names
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
DTYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32,
}  # fmt: skip
COPY_BYTES = 8 << 20
ROOT = "model."  # names lack this prefix in checkpoints of a decoder alone
_LAYER = re.compile(r"(?:model\.)?(?:decoder\.)?layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Checkpoint:
    """The safetensors files of one directory, open for reading; a context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptors: list[int] = []
        # The stored dtype's name and the extent of each tensor; None for an unsupported dtype.
        self._tensors: dict[str, tuple[str, Extent | None]] = {}
        self._left_out = ""  # ROOT if the names in the checkpoint lack it
        try:
            homes: dict[str, Path] = {}
            for path in weight_files(directory):
                found = self._open(path)
                if twice := sorted(found.keys() & homes.keys()):
                    raise CannotRun(
                        f"{path}: tensor {twice[0]} is also in {homes[twice[0]].name}",
                        hint="leave only the files of one checkpoint in the folder",
                    )
                homes |= dict.fromkeys(found, path)
                self._tensors |= found
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def check(self, model: Decoder) -> None:
        """Raise CannotRun unless every tensor of `model` is here with its shape, as floats.

        Also raise it if a layer has a weight, bias, scale, zero or expert that the model does not
        name, or if a tied head is stored and differs from the embeddings. Further tensors (rotary
        tables, other heads and towers, layers that predict further tokens) are ignored, as in
        transformers. Names may lack the leading "model.". Embeddings tied to the head may be
        stored under the head's name.
        """
        config = model.config
        behind = range(config.num_layers, config.num_layers + config.extra_layers)
        table = model.embedding.table.sources[0].name
        bare = table not in self._tensors and table.removeprefix(ROOT) in self._tensors
        self._left_out = ROOT if bare else ""
        lacks = config.tied_embeddings and not bare and table not in self._tensors
        if lacks and HEAD in self._tensors:  # safetensors kept one of two names
            self._tensors[table] = self._tensors.pop(HEAD)
        used: set[str] = set()
        for operand in (*model.matrices(), *model.vectors()):
            if operand.joined and not operand.sources[0].stored:
                self._part(operand, operand.joined)
            for source in operand.sources:
                if source.stored:
                    check_parts(source, self._stored, str(self.directory))
                    used |= {self._stored_name(source, part.suffix) for part in parts_of(source)}
                    continue
                name = self._stored_name(source)
                used.add(name)
                if name not in self._tensors:
                    raise missing(self.directory, name, self._tensors, config)
                stored, extent = self._tensors[name]
                if extent is None or stored not in FLOATS:
                    raise CannotRun(
                        f"{self.directory}: tensor {name} is stored as {stored}, not as floats "
                        "of 16 bits or more",
                        hint="use the checkpoint that it was made from: float16, bfloat16 or "
                        "float32",
                    )
                if extent.shape != source.shape:
                    raise self._misshapen(name, extent, source)
        if HEAD in self._tensors and HEAD not in used:
            table = self._stored_name(model.embedding.table.sources[0])
            if not self._is_equal(HEAD, table):
                raise CannotRun(
                    f"{self.directory}: {HEAD} differs from {table}, which config.json ties it to",
                    hint='set "tie_word_embeddings" to false in config.json',
                )
        experts = config.mixture.routing.experts if config.mixture else 0
        for name in sorted(self._tensors.keys() - used):
            layer, expert = _LAYER.match(name), _EXPERT.search(name)
            too_many = expert and int(expert[1]) >= experts
            packed_head = name.startswith("lm_head.") and name.endswith(QUANTIZED)
            if not packed_head and (not layer or int(layer[1]) in behind):
                continue
            if self._is_empty_bias(name, config):
                continue
            if name.endswith(CHANGING) or too_many:
                raise CannotRun(
                    f"{self.directory}: config.json does not account for tensor {name}",
                    hint=(expert_hint(name, config) if too_many else None)
                    or "config.json and the safetensors files do not belong together",
                )

    def _part(self, operand: Operand, joined: Source) -> None:
        """If `joined` is here, let its rows be the tensors that are the operand's sources."""
        name = self._stored_name(joined)
        if name not in self._tensors:
            return
        stored, whole = self._tensors.pop(name)
        if whole is not None and whole.shape != joined.shape:
            raise self._misshapen(name, whole, joined)
        top = 0
        for source in operand.in_checkpoint():
            extent = None
            if whole is not None:
                extent = replace(whole, shape=operand.shape).rows(top, top + source.shape[0])
            own = self._stored_name(source)
            if own in self._tensors:
                raise CannotRun(
                    f"{self.directory}: tensor {own} is also a part of {name}",
                    hint="leave only the files of one checkpoint in the folder",
                )
            self._tensors[own] = stored, extent
            top += source.shape[0]

    def _misshapen(self, name: str, extent: Extent, source: Source) -> CannotRun:
        return CannotRun(
            f"{self.directory}: tensor {name} is {_shape_text(extent.shape)}, config.json says "
            f"{_shape_text(source.shape)}",
            hint="config.json and the safetensors files do not belong together",
        )

    def _is_empty_bias(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor is a bias of zeros of a quantized module: old GPTQ tools add them."""
        module, extent = name.removesuffix(".bias"), self._tensors[name][1]
        if module == name or extent is None:
            return False
        if not (config.quantization and config.quantization.of(module)):
            return False
        bias = torch.empty(extent.shape, dtype=extent.dtype)
        read(extent, bias)
        return not bias.float().any()

    def _is_equal(self, name: str, other: str) -> bool:
        """Whether two tensors are bit for bit the same."""
        first, second = self._tensors[name][1], self._tensors[other][1]
        if first is None or second is None:
            return False
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        pieces = range(0, first.nbytes, COPY_BYTES)
        return all(
            os.pread(first.descriptor, size, first.offset + at)
            == os.pread(second.descriptor, size, second.offset + at)
            for at in pieces
            for size in [min(COPY_BYTES, first.nbytes - at)]
        )

    def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
        """Copy rows of a tensor into `out`, contiguous, converting its dtype."""
        extent = self._extent(source, rows)
        if out.dtype == extent.dtype and out.device.type == "cpu":
            read(extent, out)
            return
        count = len(out)
        step = max(1, COPY_BYTES * count // extent.nbytes)
        for start in range(0, count, step):
            some = extent.rows(start, min(start + step, count))
            piece = torch.empty(some.shape, dtype=some.dtype)
            read(some, piece)
            out[start : start + step].copy_(piece)

    def stream(self, requests: Sequence[Request], device: torch.device) -> Iterator[list[Decoded]]:
        """The rows of each request on `device`, as stored or decoded (see streaming.stream).

        A format with K first is read whole, and kept while requests ask for rows of it. Raises
        CannotRun for contents that a format does not allow.
        """
        left = Counter(source for request in requests for source, _ in request)
        kept: dict[Source, list[torch.Tensor]] = {}
        tensors = stream(self._extents(requests), device)
        for request, loaded in zip(requests, tensors, strict=True):
            found: list[Decoded] = []
            here = iter(loaded)
            for source, rows in request:
                left[source] -= 1
                if not source.stored:
                    found.append((next(here),))
                    continue
                parts = kept.get(source) or shaped(source, here, self._find)
                if source.stored.by_columns and left[source]:
                    # A CPU's tensors last for one request.
                    own = [part.clone() if part.device.type == "cpu" else part for part in parts]
                    kept.setdefault(source, own)
                else:
                    kept.pop(source, None)
                found.append(decoded(source, rows, parts))
            yield found

    def _extents(self, requests: Sequence[Request]) -> list[list[Extent]]:
        """The extents of each request: rows of plain tensors and of parts, each part once."""
        found, seen = [], set[Source]()
        for request in requests:
            needed: list[Extent] = []
            for source, rows in request:
                if not source.stored:
                    needed.append(self._extent(source, rows))
                elif not (source.stored.by_columns and source in seen):
                    seen.add(source)
                    needed += part_extents(source, rows, self._find)
            found.append(needed)
        return found

    def _extent(self, source: Source, rows: slice) -> Extent:
        extent = self._find(source, "")
        assert extent is not None, "check() came first"
        return extent.rows(rows.start, rows.stop)

    def _find(self, source: Source, suffix: str) -> Extent | None:
        """The tensor of `source`, or of a quantized one its part `suffix`; None if missing."""
        return self._stored(source, suffix)[1]

    def _stored(self, source: Source, suffix: str) -> tuple[str, Extent | None]:
        """The stored dtype's name and the extent; no name if the tensor is missing."""
        return self._tensors.get(self._stored_name(source, suffix), ("", None))

    def _stored_name(self, source: Source, suffix: str = "") -> str:
        name = source.name.removeprefix(self._left_out)
        return name.removesuffix("weight") + suffix if suffix else name

    def _open(self, path: Path) -> dict[str, tuple[str, Extent | None]]:
        """Open one file and list its tensors; CannotRun if it is no complete safetensors file."""
        start, header = read_header(path)
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        tensors: dict[str, tuple[str, Extent | None]] = {}
        for name, entry in header.items():
            offset = start + entry["data_offsets"][0]
            dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
            extent = None if dtype is None else Extent(str(path), descriptor, offset, shape, dtype)
            tensors[name] = (entry["dtype"], extent)
        return tensors

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
