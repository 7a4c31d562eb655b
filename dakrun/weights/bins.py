"""pytorch_model*.bin: which files make up a checkpoint, and their tensors, without running code.

Pickles can ask for any function to be called; torch.load(weights_only=True) refuses all but
tensors. Knows nothing of what the tensors are for or become.
"""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import indexed

WEIGHTS = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin"}
ZIP_MAGIC = b"PK\x03\x04"
COPY_ANEW = "copy the file anew (in a git clone: git lfs pull)"


def bin_files(source: Path) -> tuple[list[Path], set[str]]:
    """The weight files of a folder, and the tensor names that its index promises (else none).

    Raises UsageError where there are none or the index is wrong, CannotRun where one is missing.
    """
    if not source.is_dir():
        what = "a file, not a folder" if source.is_file() else "no such folder"
        raise UsageError(
            f"{source}: {what}", hint="give the folder with config.json and pytorch_model*.bin"
        )
    if (source / WEIGHTS).is_file():  # transformers, too, prefers it to an index
        return [source / WEIGHTS], set()
    index = source / BIN_INDEX
    if index.is_file():
        shards = indexed(index)
        names = sorted(set(shards.values()))
        for name in names:
            if not (source / name).is_file():
                raise CannotRun(
                    f"{source / name}: no such file, but {BIN_INDEX} names it",
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
            hint=f"it has safetensors already: use --model {source}"
            if ready
            else "give the folder that holds pytorch_model*.bin",
        )
    return files, set()


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of one file by name, dense and on the CPU, and the names of its other entries.

    Zip files (torch 1.6 and later) are mapped, older ones read into memory. Raises CannotRun for
    a file that asks for more than tensors, is damaged, or holds no state_dict.
    """
    entries = _load(path)
    if not isinstance(entries, dict):
        entries = {}
    named = {k: v for k, v in entries.items() if isinstance(k, str) and torch.is_tensor(v)}
    if not named:
        raise CannotRun(
            f"{path}: holds no tensors by name",
            hint="it has to be a state_dict, made by: torch.save(model.state_dict(), FILE)",
        )
    for name, tensor in named.items():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
        if not plain or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise CannotRun(
                f"{path}: {name!r} is not a plain dense tensor",
                hint="take a checkpoint that is not quantised or sparse",
            )
    return named, [repr(k)[:80] for k in entries if k not in named]


def _load(path: Path) -> Any:
    """What torch.load makes of a file with weights_only: tensors in containers."""
    with path.open("rb") as file:
        zipped = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as problem:
        asked = re.search(r"GLOBAL (\S+)", str(problem))
        if isinstance(problem, pickle.UnpicklingError) and asked:
            raise CannotRun(
                f"{path}: is more than weights: it asks for {asked[1]!r}; nothing of it was run",
                hint="take the weights from a source that you trust, as safetensors where it has "
                "them; if you made the file, save model.state_dict() alone",
            ) from None
        if "TorchScript" in str(problem) or "legacy .tar" in str(problem):
            raise CannotRun(
                f"{path}: is a TorchScript or tar file, which cannot be read without running code",
                hint="load it where you trust it, and save model.state_dict() alone",
            ) from None
        if isinstance(problem, pickle.UnpicklingError):  # its text speaks to who calls torch.load
            raise CannotRun(
                f"{path}: not what torch.save makes of weights; nothing of it was run",
                hint=f"{COPY_ANEW}; a plain pickle has to be saved by torch.save instead",
            ) from None
        raise CannotRun(
            f"{path}: not a whole file of torch.save ({brief(problem)})", hint=COPY_ANEW
        ) from None


def brief(problem: Exception) -> str:
    """The first sentence of an exception from elsewhere, in one line."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text.split(". ")[0][:160]
