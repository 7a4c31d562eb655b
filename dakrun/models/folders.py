"""What a model folder or file holds that is no plain checkpoint: adapters, quantization, GGUF.

Knows file names, not their contents.
"""

from pathlib import Path

from dakrun.errors import CannotRun, UsageError

ADAPTERS = ("adapter_config.json", "adapter_model*", "adapters.safetensors")
# Of AutoGPTQ, AutoAWQ, TensorRT Model Optimizer and ExLlamaV2's converter.
QUANTIZATIONS = (
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
    "quantization_config.json",
)
GGUF_HINT = "make a checkpoint of it: dakrun convert"


def check_folder(directory: Path) -> None:
    """Raise CannotRun if `directory` has an adapter's files or a quantizer's settings.

    Raises UsageError if it has GGUF files and no config.json.
    """
    for pattern in ADAPTERS:
        if found := first(directory, pattern):
            raise CannotRun(
                f"{directory}: holds a LoRA adapter ({found.name}), which is not supported",
                hint="merge it into its base model (peft: merge_and_unload), or move it away to "
                "run the base model alone",
            )
    for name in QUANTIZATIONS:
        if (directory / name).is_file():
            raise CannotRun(
                f"{directory}: the checkpoint is quantized ({name}), which is not supported",
                hint="use the original float16, bfloat16 or float32 checkpoint; if the weights "
                f"are such floats, move {name} away",
            )
    if not (directory / "config.json").exists() and (found := first(directory, "*.gguf")):
        raise UsageError(
            f"{directory}: holds GGUF files, which are not read as they are",
            hint=f"{GGUF_HINT} {found} OUTPUT_DIR",
        )


def first(directory: Path, pattern: str) -> Path | None:
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
