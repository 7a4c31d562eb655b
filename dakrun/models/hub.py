"""Models by the name that the user gives: a directory, a config.json, a known name or a hub id.

Downloads with huggingface_hub, imported late, which honours HF_HOME, HF_HUB_OFFLINE and HF_TOKEN.
Without a network only its cache is read: one short request shows whether the hub can be reached.
"""

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Literal

from dakrun.config import Dtype, LoadFormat, ModelConfig
from dakrun.errors import CannotRun, DakrunError, UsageError, check_file_name
from dakrun.formats.named import named_quantization
from dakrun.models.files import read_json_object
from dakrun.models.folders import check_not_gguf
from dakrun.models.hf_config import parse_model_config, read_model_config
from dakrun.models.known import hub_id, known_model, known_names

WEIGHTS = "*.safetensors"
# Only files of the root folder: some repositories have the weights in other formats below it.
PATTERNS = [WEIGHTS, "*.json", "*.txt", "*.model", "*.jinja"]
IGNORED = ["*/*", "consolidated*"]
ANSWER_S = 2.0  # seconds that the hub may take to answer, unless HF_HUB_ETAG_TIMEOUT is set
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def find_model(
    name: str,
    dtype: Dtype | Literal["auto"],
    load_format: LoadFormat,
    format: str = "auto",
) -> tuple[ModelConfig, Path | None]:
    """The architecture, and the checkpoint's folder, None for random weights of a known name.

    Raises UsageError or CannotRun if there is no such model, or if a checkpoint is to have another
    `format`.
    """
    if format != "auto" and load_format != "dummy":
        raise UsageError(
            "--format is for random weights: a checkpoint's own says how it is stored",
            hint="give --load-format dummy, or a checkpoint in that format",
        )
    config, directory = _find(name, load_format)
    return in_format(config if dtype == "auto" else config.with_dtype(dtype), format), directory


def in_format(config: ModelConfig, format: str) -> ModelConfig:
    """The model with its weights in a format of formats/named.py, or as they are for "auto".

    Raises UsageError if the model has a format of its own.
    """
    if format == "auto":
        return config
    if config.quantization:
        raise UsageError(
            f"{config.name} is stored in {config.quantization.name} already",
            hint="leave out --format, or name a 16-bit model",
        )
    quantization = named_quantization(format, config.dtype)
    return replace(config, name=f"{config.name} in {format}", quantization=quantization)


def _find(name: str, load_format: LoadFormat) -> tuple[ModelConfig, Path | None]:
    check_file_name(name)
    folder = Path(name).expanduser()
    if load_format == "dummy":
        config = model_config(name)
        random = replace(config, name=f"{config.name} with random weights")
        return random, folder if folder.is_dir() else None
    directory = model_directory(name)
    config = read_model_config(directory)
    if not folder.is_dir():  # a hub id: its folder is named after a commit
        config = replace(config, name=name)
    return config, directory


def check_name(name: str, load_format: LoadFormat) -> None:
    """Raise UsageError if `name` cannot be that of a model; reads and downloads nothing."""
    check_file_name(name)
    path = Path(name).expanduser()
    if load_format == "dummy":
        if not path.exists() and known_model(name) is None:
            _require_hub_id(name)
    elif not path.is_dir():
        _require_downloaded(name, path)


def model_config(name: str) -> ModelConfig:
    """The architecture of the model `name`; only config.json is downloaded from the hub.

    Raises UsageError for an unknown name or a malformed config.json, CannotRun for an architecture
    that is not supported or a failed download.
    """
    check_file_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return read_model_config(path)
    if path.is_file():
        check_not_gguf(path)
        return parse_model_config(read_json_object(path), name=path.resolve().parent.name)
    known = known_model(name)
    if known is not None:
        return known
    _require_hub_id(name)
    from huggingface_hub import hf_hub_download

    config = _from_hub(name, lambda: hf_hub_download(name, "config.json"))
    return parse_model_config(read_json_object(Path(config)), name=name)


def model_directory(name: str) -> Path:
    """The folder with the checkpoint `name`: a directory, or a hub id, downloaded if needed.

    Raises UsageError for other names (known names stand for architectures without weights),
    CannotRun if the download fails or has no safetensors files.
    """
    check_file_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    _require_downloaded(name, path)
    from huggingface_hub import constants, errors, snapshot_download

    def fetch() -> str:
        folder = snapshot_download(name, allow_patterns=PATTERNS, ignore_patterns=IGNORED)
        if constants.HF_HUB_OFFLINE and not any(Path(folder).glob(WEIGHTS)):
            raise errors.LocalEntryNotFoundError("only config.json was downloaded before")
        return folder

    folder = _from_hub(name, fetch)
    if not any(Path(folder).glob(WEIGHTS)):
        raise CannotRun(
            f"{name} has no safetensors files on the Hugging Face hub",
            hint="download its pytorch_model*.bin and json files into a folder SRC, then: "
            "dakrun convert SRC DST",
        )
    return Path(folder)


def tokenizer_directory(name: str) -> Path | None:
    """The folder that may hold the tokenizer of `name`: a directory, or that of a hub id.

    Of a hub id all but the weights is downloaded. None for a config.json and for known names.
    Raises as model_config does.
    """
    check_file_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() or known_model(name) is not None:
        return None
    _require_hub_id(name)
    from huggingface_hub import snapshot_download

    small = [pattern for pattern in PATTERNS if pattern != WEIGHTS]
    return Path(
        _from_hub(
            name, lambda: snapshot_download(name, allow_patterns=small, ignore_patterns=IGNORED)
        )
    )


def suggesting_directory(choice: str, model: str) -> Path:
    """The folder whose generation_config.json is taken: `choice`, or `model`'s if that is auto."""
    return model_directory(model) if choice == "auto" else Path(choice).expanduser()


def _require_downloaded(name: str, path: Path) -> None:
    """Raise UsageError unless `name`, at `path` no folder, may be a checkpoint of the hub."""
    if path.is_file():
        check_not_gguf(path)
        raise UsageError(
            f"{name}: a file, not a model directory",
            hint="give the folder that holds config.json and the safetensors files",
        )
    if known_model(name) is not None:
        raise UsageError(
            f"{name!r} names an architecture, not a checkpoint with weights",
            hint=f"give a model directory, or the hub id {hub_id(name)}; "
            "generate --load-format dummy makes random weights",
        )
    _require_hub_id(name)


def _require_hub_id(name: str) -> None:
    """Raise UsageError unless `name` has the form of a hub id."""
    if _HUB_ID.fullmatch(name):
        return
    names = known_names()
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    if "/" in name:
        hint = "give a folder with config.json and safetensors files, or a hub id ORG/NAME"
    elif close:
        hint = f"did you mean {' or '.join(close)}? Or give a model directory or a hub id"
    else:
        hint = f"give a model directory, a hub id ORG/NAME, or one of: {', '.join(names)}"
    raise UsageError(f"{name!r}: no such model directory or known name", hint=hint)


def _from_hub(name: str, fetch: Callable[[], str]) -> str:
    """The path that `fetch` downloads to; raises CannotRun with the reason if it fails.

    Where the hub does not answer, `fetch` runs as with HF_HUB_OFFLINE=1, on cached files alone.
    """
    from huggingface_hub import constants, errors, logging

    logging.set_verbosity_error()  # it would print a line for each retry
    offline = constants.HF_HUB_OFFLINE
    unreachable = None if offline else _no_answer(name)
    try:
        constants.HF_HUB_OFFLINE = offline or unreachable is not None
        return fetch()
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as problem:
        raise _failure(name, unreachable or problem) from problem
    except Exception as problem:
        raise _failure(name, problem) from problem
    finally:
        constants.HF_HUB_OFFLINE = offline


def _no_answer(name: str) -> Exception | None:
    """Why the hub does not answer a request for the model `name`; None if it does, in any way.

    Asks once, in a thread, because looking up the host's address (DNS) takes no time limit.
    """
    from huggingface_hub import constants, get_session, hf_hub_url

    own = "HF_HUB_ETAG_TIMEOUT" in os.environ
    seconds = constants.HF_HUB_ETAG_TIMEOUT if own else ANSWER_S
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(hf_hub_url(name, "config.json"), timeout=seconds)
            answers.put(None)
        except Exception as problem:
            answers.put(problem)

    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return TimeoutError(
            f"no answer within {seconds:g} s; HF_HUB_ETAG_TIMEOUT sets the seconds to wait"
        )


def _failure(name: str, problem: Exception) -> DakrunError:
    """The error for a failed download of the model `name`."""
    from huggingface_hub import errors
    from huggingface_hub.constants import HF_HUB_OFFLINE

    planning = [known for known in known_names() if (hub_id(known) or "").lower() == name.lower()]
    by_name = f"; dakrun plan takes it offline as {planning[0]}" if planning else ""
    if isinstance(problem, errors.GatedRepoError):
        return CannotRun(
            f"{name} is gated on the Hugging Face hub",
            hint="accept its licence on its page there, then set HF_TOKEN or run: hf auth login"
            + by_name,
        )
    if isinstance(problem, errors.RepositoryNotFoundError):
        return CannotRun(
            f"the Hugging Face hub has no model {name}, or it is private",
            hint="check the spelling; for a private model set HF_TOKEN; a folder of that name does "
            "not exist here",
        )
    if isinstance(problem, errors.RemoteEntryNotFoundError):
        return CannotRun(
            f"{name} has no config.json on the Hugging Face hub",
            hint="it is not a transformers checkpoint; choose one that is",
        )
    if HF_HUB_OFFLINE and isinstance(
        problem, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled
    ):
        return CannotRun(
            f"{name} is not in the local Hugging Face cache, and HF_HUB_OFFLINE is set",
            hint="download it while online, or unset HF_HUB_OFFLINE" + by_name,
        )
    reason = " ".join(str(problem.__cause__ or problem).split()) or type(problem).__name__
    remedy = "check the network, HF_ENDPOINT and the disk, or give a folder that holds the model"
    return CannotRun(
        f"{name} could not be fetched from the Hugging Face hub ({reason[:200]})",
        hint=remedy + by_name,
    )
