"""Safetensors checkpoints, read by slices straight into the tiers that the plan names.

Knows files and tensor names, but not what a model computes with them.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dakrun.errors import CannotRun, UsageError
from dakrun.hf_config import read_json_object
from dakrun.memory import PartitionedTensor, Tier

INDEX = "model.safetensors.index.json"
FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors calls them
COPY_BYTES = 8 << 20
MAX_READERS = 8

Source = tuple[str, tuple[int, ...]]
Placement = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Manifest:
    """Which checkpoint tensors make up each operand of a model.

    `matrices` are placed by the plan, `resident` tensors (norms, biases, positions) stay local;
    an operand made of several (tensor name, shape) sources stacks them along dimension 0.
    """

    matrices: Mapping[str, tuple[Source, ...]]
    resident: Mapping[str, tuple[Source, ...]]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an operand once its sources are stacked."""
        sources = self.matrices[name] if name in self.matrices else self.resident[name]
        return (sum(shape[0] for _, shape in sources), *sources[0][1][1:])


@dataclass(frozen=True)
class Weights:
    """A model's operands where they were loaded to, under the manifest's names."""

    matrices: Mapping[str, PartitionedTensor]
    resident: Mapping[str, torch.Tensor]


class Checkpoint:
    """The safetensors files of one directory, open for reading; a context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in _weight_files(directory):
                file = self._stack.enter_context(_open(path))
                self._files |= dict.fromkeys(file.keys(), file)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """The type that the tensor `name` is stored in, as safetensors calls it: F16, I8, ..."""
        return str(self._files[name].get_slice(name).get_dtype())

    def check(self, manifest: Manifest) -> None:
        """CannotRun unless every tensor of `manifest` is here with its shape, in a float type."""
        for sources in (*manifest.matrices.values(), *manifest.resident.values()):
            for name, shape in sources:
                if name not in self._files:
                    raise CannotRun(
                        f"{self.directory}: tensor {name} is missing",
                        hint="config.json and the safetensors files do not belong together, "
                        "or a file was not copied",
                    )
                if (stored := self.stored_dtype(name)) not in FLOATS:
                    raise CannotRun(
                        f"{self.directory}: tensor {name} is stored as {stored}, not as floats "
                        "of 16 bits or more",
                        hint="use the checkpoint that it was made from: float16, bfloat16 or "
                        "float32",
                    )
                if self.shape(name) != shape:
                    raise CannotRun(
                        f"{self.directory}: tensor {name} is {_by(self.shape(name))}, "
                        f"config.json says {_by(shape)}",
                        hint="config.json and the safetensors files do not belong together",
                    )

    def copy(self, name: str, rows: slice, out: torch.Tensor) -> None:
        """Copy tensor[rows] into `out`, converting its dtype."""
        source = self._files[name].get_slice(name)
        step = max(1, COPY_BYTES // max(1, out[:1].numel() * out.element_size()))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            out[start - rows.start : stop - rows.start].copy_(source[start:stop])


def load(
    checkpoint: Checkpoint,
    manifest: Manifest,
    placements: Mapping[str, Placement],
    tiers: Mapping[str, Tier],
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """Allocate and fill every operand; `placements` gives (tier, octets) of each matrix.

    Resident tensors go to `device`. Nothing is allocated before the checkpoint was checked.
    """
    checkpoint.check(manifest)
    matrices, resident = {}, {}
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as readers:
        jobs = []
        for name, sources in manifest.matrices.items():
            rows, cols = manifest.shape(name)
            matrices[name] = PartitionedTensor.empty((rows, cols), dtype, placements[name], tiers)
            for part in matrices[name].parts:
                jobs.append(readers.submit(_fill, checkpoint, sources, part.rows, part.data))
        for name, sources in manifest.resident.items():
            shape = manifest.shape(name)
            out = resident[name] = torch.empty(shape, dtype=dtype, device=device)
            jobs.append(readers.submit(_fill, checkpoint, sources, slice(0, shape[0]), out))
        for job in jobs:
            job.result()
    return Weights(matrices, resident)


def _fill(
    checkpoint: Checkpoint, sources: Sequence[Source], rows: slice, out: torch.Tensor
) -> None:
    """Copy rows of the stacked sources into `out`."""
    top = 0
    for name, shape in sources:
        start, stop = max(rows.start, top), min(rows.stop, top + shape[0])
        if start < stop:
            target = out[start - rows.start : stop - rows.start]
            checkpoint.copy(name, slice(start - top, stop - top), target)
        top += shape[0]


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that the index names, else all."""
    index = directory / INDEX
    if index.is_file():
        shards = read_json_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise UsageError(f"{index}: has no weight_map", hint="copy the index anew")
        files = [directory / str(name) for name in sorted(set(shards.values()))]
        for path in files:
            if not path.is_file():
                raise CannotRun(
                    f"{path}: no such file, but {INDEX} names it", hint="copy the missing shard"
                )
        return files
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    if list(directory.glob("*.bin")):
        raise CannotRun(
            f"{directory}: holds .bin files, which can contain code",
            hint=f"make safetensors of them: dakrun convert {directory} OUTPUT_DIR",
        )
    raise CannotRun(
        f"{directory}: has no safetensors files", hint="copy the checkpoint's *.safetensors"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise CannotRun(
            f"{path}: not a whole safetensors file ({problem})", hint="copy the file anew"
        ) from None


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
