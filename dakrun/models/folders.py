"""What a model folder or file holds: weight files, or adapters, quantization and GGUF instead.

Knows file names, not their contents.
"""

from pathlib import Path

from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import safetensors_files

ADAPTERS = ("adapter_config.json", "adapter_model*", "adapters.safetensors")
EXLLAMA = "quantization_config.json"  # of ExLlamaV2's converter
GGUF_HINT = "make a checkpoint of it: dakrun convert"


def check_folder(directory: Path) -> None:
    """Raise CannotRun if `directory` has an adapter's files or ExLlamaV2's settings.

    Raises UsageError if it has GGUF files and no config.json.
    """
    for pattern in ADAPTERS:
        if found := _first(directory, pattern):
            raise CannotRun(
                f"{directory}: holds a LoRA adapter ({found.name}), which is not supported",
                hint="merge it into its base model (peft: merge_and_unload), or move it away to "
                "run the base model alone",
            )
    if (directory / EXLLAMA).is_file():
        raise CannotRun(
            f"{directory}: the checkpoint is quantized by ExLlamaV2 ({EXLLAMA}), which is not "
            "supported",
            hint="use an AWQ, GPTQ, FP8 or 16-bit checkpoint; if this one has 16 bits, move "
            f"{EXLLAMA} away",
        )
    if not (directory / "config.json").exists() and (found := _first(directory, "*.gguf")):
        raise UsageError(
            f"{directory}: holds GGUF files, which are not read as they are",
            hint=f"{GGUF_HINT} {found} OUTPUT_DIR",
        )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint; CannotRun where it has none."""
    if files := safetensors_files(directory):
        return files
    if gguf := _first(directory, "*.gguf"):
        raise CannotRun(
            f"{directory}: holds GGUF files, which are not read as they are",
            hint=f"{GGUF_HINT} {gguf} OUTPUT_DIR",
        )
    if list(directory.glob("*.bin")):
        raise CannotRun(
            f"{directory}: holds .bin files, which can contain code",
            hint=f"make safetensors of them: dakrun convert {directory} OUTPUT_DIR",
        )
    raise CannotRun(
        f"{directory}: has no safetensors files", hint="copy the checkpoint's *.safetensors"
    )


def _first(directory: Path, pattern: str) -> Path | None:
    """The first file by name in `directory` that `pattern` matches."""
    return min((path for path in directory.glob(pattern) if path.is_file()), default=None)


def check_not_gguf(path: Path) -> None:
    """Raise UsageError if the file `path` is a GGUF file, by its name or its first bytes."""
    with path.open("rb") as file:
        is_gguf = path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF"
    if is_gguf:
        raise UsageError(
            f"{path}: a GGUF file, which is not read as it is",
            hint=f"{GGUF_HINT} {path} OUTPUT_DIR",
        )
