"""pytorch_model*.bin checkpoints: their files and tensors, read without running pickled code.

A pickle can call any function; torch.load(weights_only=True) refuses everything but tensors.
Knows names and files, not the model.
"""

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import check_is_file, indexed
from dakrun.units import format_bytes

WEIGHTS = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin"}
ZIP_MAGIC = b"PK\x03\x04"
# Limit of a zip file's pickle and compressed entries, which are held in memory. A tensor's name and
# shape take less than 200 bytes of a pickle, and its data is not compressed.
MAX_UNPACKED_BYTES = 2 << 20
COPY_AGAIN = "copy the file again (in a git clone: git lfs pull)"


def bin_files(source: Path) -> tuple[list[Path], set[str]]:
    """The weight files of folder `source`, and the tensor names in its index (empty without one).

    Raises UsageError if there are no weight files or the index is malformed, CannotRun if a file
    of the index is missing.
    """
    if not source.is_dir():
        what = "a file, not a folder" if source.is_file() else "no such folder"
        raise UsageError(
            f"{source}: {what}", hint="give the folder with config.json and pytorch_model*.bin"
        )
    if (source / WEIGHTS).is_file():  # preferred to an index, as in transformers
        return [source / WEIGHTS], set()
    index = source / BIN_INDEX
    if index.is_file():
        shards = indexed(index)
        names = sorted(set(shards.values()))
        for name in names:
            if not (source / name).is_file():
                raise CannotRun(
                    f"{source / name}: no such file, but {BIN_INDEX} lists it",
                    hint="copy the missing shard",
                )
        return [source / name for name in names], set(shards)
    files = sorted(source.glob("pytorch_model*.bin")) or sorted(
        path for path in source.glob("*.bin") if path.name not in NOT_WEIGHTS
    )
    if not files:
        ready = any(source.glob("*.safetensors"))
        raise UsageError(
            f"{source}: has no .bin files",
            hint=f"it already has safetensors: use --model {source}"
            if ready
            else "give the folder with pytorch_model*.bin",
        )
    return files, set()


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of one file by name, dense and on the CPU, and the keys of its other entries.

    Zip files (torch 1.6 and later) are mapped, older ones are read into memory. Raises CannotRun if
    the file asks to run code, is damaged, or holds no state_dict.
    """
    entries = _load(path)
    if not isinstance(entries, dict):
        entries = {}
    named = {k: v for k, v in entries.items() if isinstance(k, str) and torch.is_tensor(v)}
    if not named:
        raise CannotRun(
            f"{path}: not a dictionary of named tensors",
            hint="it must be a state_dict, saved by: torch.save(model.state_dict(), FILE)",
        )
    for name, tensor in named.items():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
        if not plain or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise CannotRun(
                f"{path}: {name!r} is not a plain dense tensor",
                hint="use a checkpoint that is neither quantised nor sparse",
            )
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CannotRun(
                f"{path}: {name!r} takes {format_bytes(tensor.nbytes)}, the file has less",
                hint="it repeats elements: save tensor.contiguous() instead",
            )
    return named, [repr(k)[:80] for k in entries if k not in named]


def _load(path: Path) -> Any:
    """The object in the file, by torch.load(weights_only=True); CannotRun if that fails."""
    check_is_file(path)
    with path.open("rb") as file:
        zipped = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    try:
        if zipped:
            _check_unpacked_bytes(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except CannotRun:
        raise
    except Exception as problem:
        asked = re.search(r"GLOBAL (\S+)", str(problem))
        if isinstance(problem, pickle.UnpicklingError) and asked:
            raise CannotRun(
                f"{path}: asks to run {asked[1]!r} while it is loaded; no code of it was run",
                hint="get the weights from a source that you trust, preferably as safetensors; "
                "if you made the file, save only model.state_dict()",
            ) from None
        if "TorchScript" in str(problem) or "legacy .tar" in str(problem):
            raise CannotRun(
                f"{path}: a TorchScript or tar file, which cannot be read without running code",
                hint="if you trust it, load it with torch and save only model.state_dict()",
            ) from None
        if isinstance(problem, pickle.UnpicklingError):  # its message would not help a user
            raise CannotRun(
                f"{path}: not weights saved by torch.save; no code of it was run",
                hint=f"{COPY_AGAIN}; if it is a plain pickle, save it by torch.save",
            ) from None
        raise CannotRun(
            f"{path}: damaged, or not a file of torch.save ({brief(problem)})", hint=COPY_AGAIN
        ) from None


def _check_unpacked_bytes(path: Path) -> None:
    """Raise CannotRun if the zip file `path` unpacks to more than a state_dict's pickle.

    Raises zipfile.BadZipFile if it is damaged.
    """
    with zipfile.ZipFile(path) as entries:
        unpacked = sum(
            entry.file_size
            for entry in entries.infolist()
            if entry.compress_type != zipfile.ZIP_STORED or entry.filename.endswith(".pkl")
        )
    if unpacked > MAX_UNPACKED_BYTES:
        raise CannotRun(
            f"{path}: its pickle and compressed entries unpack to {format_bytes(unpacked)}, more "
            f"than the {format_bytes(MAX_UNPACKED_BYTES)} that weights need; nothing was unpacked",
            hint="get the weights from a source that you trust, preferably as safetensors",
        )


def brief(problem: Exception) -> str:
    """The first sentence of a library's exception, in one line."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text.split(". ")[0][:160]
