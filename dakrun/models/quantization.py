"""The quantization settings of a checkpoint, read into a Quantization.

They are in config.json's `quantization_config`, or in ModelOpt's hf_quant_config.json. Each
quantizer has keys of its own; formats/ knows what they stand for.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dakrun.errors import CannotRun, UsageError
from dakrun.formats.awq import Awq
from dakrun.formats.fp8 import Fp8
from dakrun.formats.gptq import Gptq
from dakrun.formats.int8 import Int8
from dakrun.formats.nvfp4 import Nvfp4
from dakrun.formats.pack_quantized import PackQuantized
from dakrun.formats.quantization import LINEARS, Quantization
from dakrun.formats.stored import SCALE_DTYPES, Stored
from dakrun.models.files import read_header, read_json_object, safetensors_files

SUPPORTED = (
    "FP8 (e4m3), 4 and 8 bits of AWQ, GPTQ and compressed-tensors, INT8, NVFP4, and 16 or 32 bits"
)
HINT = f"supported are {SUPPORTED}"
_HEAD = "lm_head"
SCALE_NAMES = ("scales", "weight_scale", "weight_scale_inv")


def parse_quantization(raw: Any, *, name: str, dtype: str) -> Quantization:
    """Translate `raw`, a quantization_config, of a model called `name`, computed in `dtype`.

    Scales are taken to have `dtype` where the quantizer writes them so. Raises CannotRun for what
    is not supported, UsageError for malformed settings.
    """
    settings = _Settings(raw, name, dtype)
    method = settings.text("quant_method", "compressed-tensors" if "config_groups" in raw else "")
    if not method:
        settings.malformed("quant_method", raw.get("quant_method"), "the name of a quantizer")
    if method not in _METHODS:
        settings.refuse(f"quantized with {method}")
    found = _METHODS[method](settings)
    try:
        found.of("")  # compiles the patterns
    except re.error as problem:
        settings.malformed("", str(problem), "made of regular expressions")
    return found


class _Settings:
    """The settings `raw` of a quantizer; errors name the model."""

    def __init__(self, raw: Any, name: str, dtype: str) -> None:
        self.name, self.dtype = name, dtype
        if not isinstance(raw, Mapping):
            self.malformed("", raw, "an object")
        self.raw: Mapping[str, Any] = raw

    def refuse(self, what: str, hint: str = HINT) -> NoReturn:
        raise CannotRun(f"{self.name}: {what}, which is not supported", hint=hint)

    def malformed(self, key: str, value: object, expected: str) -> NoReturn:
        found = "missing" if value is None else f"{value!r:.60}, not {expected}"
        raise UsageError(
            f"{self.name}: config.json, quantization_config{key and ': '}{key} is {found}",
            hint="compare config.json with the published one",
        )

    def part(self, key: str, raw: Any) -> "_Settings":
        if not isinstance(raw, Mapping):
            self.malformed(key, raw, "an object")
        return _Settings(raw, self.name, self.dtype)

    def text(self, key: str, default: str) -> str:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            self.malformed(key, value, "a string")
        return default if value is None else value.lower()

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.malformed(key, value, "true or false")
        return default if value is None else value

    def names(self, key: str) -> list[str]:
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.malformed(key, value, "a list of names")
        return value

    def bits(self, *allowed: int) -> int:
        key = next((k for k in ("bits", "w_bit", "num_bits") if k in self.raw), "bits")
        value = self.raw.get(key)
        if type(value) is not int:
            self.malformed(key, value, "an integer")
        if value not in allowed:
            self.refuse(f"weights of {value} bits")
        return value

    def group(self) -> int:
        """Columns of a group; 0 for the whole row."""
        value = next((self.raw[k] for k in ("group_size", "q_group_size") if k in self.raw), 128)
        if type(value) is not int or value == 0 or value < -1:
            self.malformed("group_size", value, "a positive integer or -1")
        return max(value, 0)


def _within(name: str) -> str:
    """A pattern for modules whose names have `name`, a name or a pattern, between dots."""
    name = name.removesuffix(".")  # which some write behind a layer's number
    try:
        re.compile(name)
    except re.error:
        name = re.escape(name)
    return rf"(?:.*\.)?(?:{name})(?:\..*)?"


def _skipped(settings: _Settings, key: str = "modules_to_not_convert") -> tuple[str, ...]:
    """Patterns of the modules that quantizers of one format leave out; the lm_head always."""
    return tuple(_within(name) for name in (_HEAD, *settings.names(key)))


def _awq(settings: _Settings) -> Quantization:
    version = settings.text("version", settings.text("format", "gemm"))
    if version != "gemm":
        settings.refuse(f"AWQ in the order of {version!r}", "supported is AWQ's order 'gemm'")
    settings.bits(4)
    zeros = settings.flag("zero_point", True)
    stored = Awq("float16", settings.group(), zeros)
    return Quantization("awq", ((LINEARS, stored),), _skipped(settings))


def _gptq(settings: _Settings) -> Quantization:
    if settings.flag("desc_act", False):
        settings.refuse(
            "GPTQ with activation order (desc_act)", "take a checkpoint with desc_act false"
        )
    order = settings.text("checkpoint_format", "gptq")
    if order not in ("gptq", "gptq_v2"):
        settings.refuse(f"GPTQ in the order of {order!r}", "supported are 'gptq' and 'gptq_v2'")
    version = 2 if order == "gptq_v2" else 1

    def stored(of: _Settings) -> Gptq:
        return Gptq("float16", of.bits(4, 8), of.group(), of.flag("sym", True), version)

    ignored = list(_skipped(settings))[settings.flag(_HEAD, False) :]
    groups: list[tuple[str, Stored]] = []
    for pattern, change in settings.part("dynamic", settings.raw.get("dynamic") or {}).raw.items():
        if pattern.startswith("-:"):
            earlier = "".join(f"(?!{kept})" for kept, _ in groups)  # the first that fits counts
            ignored.append(f"{earlier}(?:{pattern[2:]}).*")
        else:
            changed = settings.part(
                "dynamic", {**settings.raw, **settings.part("dynamic", change).raw}
            )
            groups.append((f"(?:{pattern.removeprefix('+:')}).*", stored(changed)))
    groups.append((LINEARS, stored(settings)))
    return Quantization("gptq", tuple(groups), tuple(ignored))


def _fp8(settings: _Settings) -> Quantization:
    """FP8 of DeepSeek's kind: blocks with weight_scale_inv, or a scale per tensor."""
    fmt = settings.text("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        settings.refuse(f"FP8 of the kind {fmt}", "supported is e4m3")
    block = settings.raw.get("weight_block_size")
    stored = Fp8("float32")
    if block is not None:
        stored = Fp8("float32", _block(settings, "weight_block_size", block), "weight_scale_inv")
    unapplied = (f"{settings.text('activation_scheme', 'dynamic')} FP8 activations",)
    return Quantization("fp8", ((LINEARS, stored),), _skipped(settings), unapplied)


def _fbgemm(settings: _Settings) -> Quantization:
    stored = Fp8("float32", (1, 0))
    return Quantization(
        "fbgemm_fp8", ((LINEARS, stored),), _skipped(settings), ("FP8 activations",)
    )


def _block(settings: _Settings, key: str, block: Any) -> tuple[int, int]:
    numbers = isinstance(block, list) and [type(size) for size in block] == [int, int]
    if not numbers or min(block) < 1:
        settings.malformed(key, block, "two positive integers")
    return block[0], block[1]


def _modelopt(settings: _Settings) -> Quantization:
    if "quantization" in settings.raw:  # hf_quant_config.json
        settings = settings.part("quantization", settings.raw["quantization"])
    algorithm = settings.text("quant_algo", "")
    formats: dict[str, tuple[Stored, str]] = {
        "fp8": (Fp8("float32"), "FP8 activations"),
        "fp8_pb_wo": (Fp8("float32", (128, 128)), ""),
        "fp8_per_channel_per_token": (Fp8("float32", (1, 0)), "FP8 activations"),
        "nvfp4": (Nvfp4(divides=False), "NVFP4 activations"),
        "nvfp4_awq": (Nvfp4(divides=False), "NVFP4 activations"),
    }
    if algorithm not in formats or algorithm == "nvfp4_awq":
        settings.refuse(f"quantized by ModelOpt with {algorithm or 'an unknown algorithm'}")
    stored, activations = formats[algorithm]
    skipped = settings.names("exclude_modules") + settings.names("ignore")
    ignored = tuple(rf"(?:{fnmatch.translate(name)}|{re.escape(name)}\..*)" for name in skipped)
    unapplied = [activations] if activations else []
    if settings.raw.get("kv_cache_quant_algo") or settings.raw.get("kv_cache_scheme"):
        unapplied.append("a quantized KV cache")
    return Quantization("modelopt", ((LINEARS, stored),), ignored, tuple(unapplied))


def _compressed_tensors(settings: _Settings) -> Quantization:
    sparsity = settings.raw.get("sparsity_config") or {}
    if sparsity and settings.part("sparsity_config", sparsity).text("format", "dense") != "dense":
        settings.refuse("sparse weights of compressed-tensors")
    if settings.raw.get("transform_config"):
        settings.refuse("compressed-tensors with transforms")
    listed = settings.raw.get("config_groups")
    if not isinstance(listed, Mapping) or not listed:
        settings.malformed("config_groups", listed, "an object of groups")
    every = settings.text("format", "")
    groups: list[tuple[str, Stored]] = []
    unapplied = []
    for key, raw in listed.items():
        group = settings.part(f"config_groups, {key}", raw)
        stored = _of_group(group, group.text("format", every))
        groups += [(_target(target), stored) for target in group.names("targets") or ["Linear"]]
        if group.raw.get("input_activations"):
            activations = group.part("input_activations", group.raw["input_activations"])
            unapplied.append(f"activations of {activations.raw.get('num_bits')} bits")
    if settings.raw.get("kv_cache_scheme"):
        unapplied.append("a quantized KV cache")
    # A module's own name comes before patterns, and patterns before all linear modules.
    groups.sort(key=lambda each: (each[0] == LINEARS, each[0].endswith(".*")))
    ignored = tuple(_target(name) for name in settings.names("ignore"))
    return Quantization(
        "compressed-tensors", tuple(groups), ignored, tuple(dict.fromkeys(unapplied))
    )


def _target(target: str) -> str:
    """A pattern for a class of modules, a pattern behind "re:", or a module's name."""
    if target == "Linear":
        return LINEARS
    return f"(?:{target[3:]}).*" if target.startswith("re:") else re.escape(target)


def _of_group(group: _Settings, order: str) -> Stored:
    """The format of a group of compressed-tensors, whose tensors are in the order `order`."""
    weights = group.part("weights", group.raw.get("weights"))
    kind, strategy = weights.text("type", "int"), weights.text("strategy", "")
    zeros = not weights.flag("symmetric", True)
    size = weights.group() if weights.raw.get("group_size") else 0
    if str(weights.raw.get("actorder")).lower() in ("group", "dynamic", "true"):
        group.refuse("compressed-tensors with activation order (actorder group)")
    if order == "nvfp4-pack-quantized":
        return Nvfp4()
    if order == "pack-quantized" and kind == "int":
        return PackQuantized(weights.dtype, weights.bits(4, 8), size, zeros)
    if order in ("int-quantized", "naive-quantized") and kind == "int":
        weights.bits(8)
        return Int8(weights.dtype, size, strategy != "tensor", zeros)
    if order in ("float-quantized", "naive-quantized") and kind == "float" and not zeros:
        weights.bits(8)
        blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size)}
        if strategy == "block":
            blocks["block"] = _block(group, "block_structure", weights.raw.get("block_structure"))
        if strategy in blocks:
            return Fp8(weights.dtype, blocks[strategy])
    group.refuse(f"compressed-tensors in the format {order or '(none named)'} of type {kind}")


# Files in which quantizers wrote their settings before config.json had keys for them.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def settings_beside(directory: Path) -> Mapping[str, Any] | None:
    """The settings of a quantizer that wrote a file of its own; None where there is no such file.

    Raises UsageError if the file is malformed.
    """
    for name, method in _FILES.items():
        if (directory / name).is_file():
            return {"quant_method": method, **read_json_object(directory / name)}
    return None


def with_scale_dtypes(quantization: Quantization, directory: Path) -> Quantization:
    """The formats with the dtypes that scales have in the checkpoint's first file, if there is one.

    Raises CannotRun if the file is damaged.
    """
    files = safetensors_files(directory)
    if not files or not files[0].is_file():
        return quantization
    found: dict[Stored, str] = {}
    for name, entry in sorted(read_header(files[0])[1].items()):
        module, _, suffix = name.rpartition(".")
        dtype = SCALE_DTYPES.get(entry["dtype"])
        if dtype and suffix in SCALE_NAMES and (stored := quantization.of(module)):
            found.setdefault(stored, dtype)
    groups = tuple(
        (pattern, replace(stored, scale_dtype=found.get(stored, stored.scale_dtype)))
        for pattern, stored in quantization.groups
    )
    return replace(quantization, groups=groups)


_METHODS: dict[str, Callable[[_Settings], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors,
}
