"""Conversion of pytorch_model*.bin checkpoints to safetensors, without running pickled code.

Knows files, tensor names and shared storage. Of the model it only asks whether its embeddings are
tied.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import HEAD, INDEX, RESERVED
from dakrun.models.hf_config import read_model_config
from dakrun.units import format_bytes
from dakrun.weights.bins import BIN_INDEX, bin_files, brief, read_tensors

SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")  # configuration and tokenizer
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Conversion:
    """The files, tensors and bytes that a conversion wrote, and the entries that it dropped.

    `tied` names the heads left out because they are the embedding, `not_tensors` the entries left
    out because they are no tensors, `unread` the keys of a GGUF file that are not translated.
    """

    target: Path
    tensors: int
    nbytes: int
    files: int
    tied: tuple[str, ...]
    not_tensors: tuple[str, ...]
    unread: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line for people."""
        plural = "s" if self.files > 1 else ""
        text = (
            f"{self.target}: {self.tensors} tensors, {format_bytes(self.nbytes)} "
            f"in {self.files} safetensors file{plural}"
        )
        if self.tied:
            text += f"; {', '.join(self.tied)} left out: tied to the embedding"
        if self.not_tensors:
            text += f"; entries left out, as they are not tensors: {', '.join(self.not_tensors)}"
        return text


def convert_checkpoint(
    source: Path,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    note: Callable[[str], None] = lambda text: None,
) -> Conversion:
    """Write the .bin checkpoint in folder `source` as safetensors into the new folder `target`.

    Only one source file is mapped at a time. An output file holds tensors of one source file, at
    most `shard_bytes` of them or a single larger one. `note` is called with a progress line for
    each source file. `target` appears only when it is complete.

    Raises UsageError if `source` is no .bin checkpoint or `target` is not empty; CannotRun if a
    file is damaged or asks to run code, or the disk is too small.
    """
    target = target.resolve()
    with disk_errors(target):
        files, names = bin_files(source)
        tied = _tied_embeddings(source)
        check_target(target, sum(path.stat().st_size for path in files))
        with staged(target) as folder:
            done = _write(files, folder, shard_bytes, tied, note)
            if missing := sorted(names - done.seen):
                raise CannotRun(
                    f"{source / BIN_INDEX}: tensor {missing[0]!r} is in none of its files",
                    hint="index and files are from different checkpoints; copy them again",
                )
            name_shards(folder, done)
            _copy_configuration(source, folder)
    return done.conversion(target)


class Progress:
    """Tensor names of each output file so far, in order, and the entries seen and dropped."""

    def __init__(self) -> None:
        self.shards: list[list[str]] = []
        self.seen: set[str] = set()
        self.tied: list[str] = []
        self.not_tensors: list[str] = []
        self.nbytes = 0

    def conversion(self, target: Path) -> Conversion:
        """The conversion into `target`, once it is complete."""
        return Conversion(
            target=target,
            tensors=sum(map(len, self.shards)),
            nbytes=self.nbytes,
            files=len(self.shards),
            tied=tuple(self.tied),
            not_tensors=tuple(self.not_tensors),
        )


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn an OSError of a conversion into `target` into CannotRun."""
    try:
        yield
    except OSError as problem:
        where = str(problem.filename or target)
        raise CannotRun(
            f"{where}: {problem.strerror or problem}",
            hint="check permissions and free disk space; no partial output was kept",
        ) from None


def _tied_embeddings(source: Path) -> bool:
    """Whether config.json ties lm_head to the embedding; False for unsupported architectures."""
    try:
        return read_model_config(source).tied_embeddings
    except CannotRun:
        return False


def check_target(target: Path, nbytes: int) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"{target}: exists and is not an empty folder",
            hint="choose a folder that does not exist yet",
        )
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder", hint="create it, or change DST")
    free = shutil.disk_usage(target.parent).free
    if free < nbytes:
        raise CannotRun(
            f"{target.parent}: only {format_bytes(free)} are free, but the result needs about "
            f"{format_bytes(nbytes)}",
            hint="free disk space, or put DST on another disk",
        )


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`: renamed to it on success, removed on an exception."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        umask = os.umask(0o077)
        os.umask(umask)
        for path in folder.iterdir():
            path.chmod(0o666 & ~umask)
        folder.chmod(0o777 & ~umask)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(
    files: Iterable[Path],
    folder: Path,
    shard_bytes: int,
    tied: bool,
    note: Callable[[str], None],
) -> Progress:
    """Write output files named 0, 1, ... into `folder`."""
    done = Progress()
    for path in files:
        note(f"converting {path.name}")
        _write_one(path, folder, shard_bytes, tied, done)
    return done


def _write_one(path: Path, folder: Path, shard_bytes: int, tied: bool, done: Progress) -> None:
    """Convert one source file, and unmap it."""
    tensors, others = read_tensors(path)
    done.not_tensors += others
    if RESERVED in tensors:
        raise CannotRun(
            f"{path}: has a tensor called {RESERVED!r}, a name reserved by safetensors",
            hint="save it under another name",
        )
    if twice := sorted(done.seen & tensors.keys()):
        raise CannotRun(
            f"{path}: tensor {twice[0]!r} is in another file, too",
            hint="keep only the files of one checkpoint in the folder",
        )
    done.seen |= tensors.keys()
    if tied and _head_is_embedding(tensors):
        del tensors[HEAD]
        done.tied.append(HEAD)
    users: dict[int, int] = {}  # tensors by the address of their storage
    for tensor in tensors.values():
        start = tensor.untyped_storage().data_ptr()
        users[start] = users.get(start, 0) + 1
    for names in _groups(tensors, shard_bytes):
        try:
            own = {name: _unshared(tensors[name], users) for name in names}
            safetensors.torch.save_file(
                own, folder / str(len(done.shards)), metadata={"format": "pt"}
            )
        except (SafetensorError, KeyError, ValueError, RuntimeError) as problem:
            raise CannotRun(
                f"{path}: cannot be written as safetensors ({brief(problem)})",
                hint="check free disk space and the tensors' dtypes; no partial output was kept",
            ) from None
        done.shards.append(names)
        done.nbytes += sum(tensor.nbytes for tensor in own.values())


def _head_is_embedding(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether lm_head.weight is the same memory as the embedding."""
    head = tensors.get(HEAD)
    return head is not None and any(
        name.endswith(EMBEDDING)
        and head.data_ptr() == other.data_ptr()
        and (head.shape, head.stride(), head.dtype) == (other.shape, other.stride(), other.dtype)
        for name, other in tensors.items()
    )


def _groups(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[list[str]]:
    """The names in order, in groups of at most `limit` bytes or of one larger tensor."""
    group: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor.nbytes
    if group:
        yield group


def _unshared(tensor: torch.Tensor, users: Mapping[int, int]) -> torch.Tensor:
    """`tensor`, contiguous; a copy if another tensor of the file uses its storage."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.clone() if users.get(tensor.untyped_storage().data_ptr(), 0) > 1 else tensor


def name_shards(folder: Path, done: Progress) -> None:
    """Give the output files their final names; write an index if there are several."""
    count = len(done.shards)
    if count == 1:
        (folder / "0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(done.shards):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        (folder / str(number)).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": done.nbytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_configuration(source: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer, but no index of weight files."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
