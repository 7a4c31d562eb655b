"""The metadata of a GGUF file, translated to config.json and generation_config.json.

Keeps account of the keys that were read: others that may change a model's output are named.
Defaults are llama.cpp's (llama-vocab.cpp and llama-model.cpp).
"""

from pathlib import Path
from typing import Any

import torch

from dakrun.config import Dtype
from dakrun.errors import CannotRun, UsageError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # by which the frequencies of RoPE are divided
_GGML = "tokenizer.ggml."
# Pre-tokenizers of byte-level BPE with which llama.cpp begins a text with BOS, and takes a word
# that is a token as it is, whatever the merges.
_LLAMA3_PRE = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "jina-v5-nano",
)
_BEGIN_PRE = (*_LLAMA3_PRE, "tekken", "chameleon")
_WHOLE_WORDS_PRE = (*_LLAMA3_PRE, "tekken", "youtu", "minicpm5")
_GPT2_PRE = (
    "gpt-2",
    "phi-2",
    "gigachat",
    "a.x-4.0",
    "mellum",
    "exaone4",
)  # as transformers' default
# Keys, or beginnings of keys, that do not change the output.
_HARMLESS = (
    *("GGUF.", "general.", "quantize.", "split.", "tokenizer.chat_template"),
    *("tokenizer.huggingface.json", "tokenizer.rwkv."),
    *(
        f"{_GGML}{name}"
        for name in ("tokens", "token_type", "scores", "merges", "unknown_token_id")
    ),
    *(f"{_GGML}{name}" for name in ("seperator_token_id", "separator_token_id", "mask_token_id")),
    *(f"{_GGML}{name}" for name in ("cls_token_id", "fim_", "prefix_", "suffix_", "middle_")),
)
_HARMLESS_OF_FAMILY = ("vocab_size", "rope.scaling.finetuned")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p"}
_SHOWN = 40  # characters of a value in the warning


class Metadata:
    """The keys of gguf's reader `file`; messages name `source`."""

    def __init__(self, file: Any, source: Path) -> None:
        self.file, self.source = file, source
        self._read: set[str] = set()
        self.family = self.get("general.architecture")
        if self.family not in ARCHITECTURES:
            raise CannotRun(
                f"{source}: architecture {self.family} is not supported",
                hint=f"supported in GGUF files are {', '.join(ARCHITECTURES)}",
            )
        self._splits = _known_splits()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; raises UsageError where it has none and there is no default."""
        self._read.add(key)
        field = self.file.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise UsageError(
                f"{self.source}: its metadata has no {key}",
                hint="download the file again, or convert the model anew",
            )
        return default

    def has(self, key: str) -> bool:
        """Whether the file has `key`."""
        return self.file.get_field(key) is not None

    @property
    def is_sentencepiece(self) -> bool:
        """Whether the vocabulary is one of SentencePiece, not of byte-level BPE."""
        return bool(self.get(f"{_GGML}model", "") == "llama")

    @property
    def pre(self) -> str:
        """The name of the pre-tokenizer."""
        return str(self.get(f"{_GGML}pre", "default"))

    def token_ids(self) -> dict[str, int]:
        """The ids of bos, eos and pad, of those that there are."""
        ids = {"bos": 1, "eos": 2} if self.is_sentencepiece else {}
        for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            if self.has(key := f"{_GGML}{name}_token_id"):
                ids[kind] = int(self.get(key))
        return ids

    @property
    def begins(self) -> bool:
        """Whether a text begins with BOS."""
        default = self.is_sentencepiece or self.pre in _BEGIN_PRE
        return bool(self.get(f"{_GGML}add_bos_token", default))

    @property
    def ends(self) -> bool:
        """Whether a text ends with EOS."""
        return bool(self.get(f"{_GGML}add_eos_token", False))

    @property
    def keeps_whole_words(self) -> bool:
        """Whether a word that is a token is that token, whatever the merges."""
        return not self.is_sentencepiece and self.pre in _WHOLE_WORDS_PRE

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json: all end tokens, and the sampling that the file suggests."""
        settings: dict[str, Any] = {}
        ends = [self.token_ids()["eos"]] if "eos" in self.token_ids() else []
        for kind in ("eot", "eom"):
            if self.has(key := f"{_GGML}{kind}_token_id"):
                ends.append(int(self.get(key)))
        if ends:
            settings["eos_token_id"] = list(dict.fromkeys(ends))
        for name, ours in _SAMPLING.items():
            if self.has(key := f"general.sampling.{name}"):
                value = self.get(key)
                settings[ours] = decimal(value) if isinstance(value, float) else value
        if settings.get("temperature", 0) > 0:
            settings["do_sample"] = True
        return settings

    def unread(self) -> list[str]:
        """Keys that were not read and may change the output, with their values; read all before."""
        if not self.is_sentencepiece and self.pre not in (*self._splits, *_GPT2_PRE):
            self._read.discard(f"{_GGML}pre")
        if self.get(f"{_GGML}add_space_prefix", self.is_sentencepiece) != self.is_sentencepiece:
            self._read.discard(f"{_GGML}add_space_prefix")
        for key in ("add_sep_token", "remove_extra_whitespaces"):
            if (
                self.has(f"{_GGML}{key}")
                and self.file.get_field(f"{_GGML}{key}").contents() is False
            ):
                self._read.add(f"{_GGML}{key}")
        harmless = (*_HARMLESS, *(f"{self.family}.{name}" for name in _HARMLESS_OF_FAMILY))
        return [
            f"{key} = {_shown(field.contents())}"
            for key, field in self.file.fields.items()
            if key not in self._read
            and (key.startswith("general.sampling.") or not key.startswith(harmless))
        ]


def _known_splits() -> tuple[str, ...]:
    """The pre-tokenizers that transformers knows.

    Raises CannotRun for a transformers without a table of them, like 5.17, whatever tokenizer the
    file has.
    """
    from transformers import __version__
    from transformers.integrations.gguf import gguf_tokenizer_mapping as known

    if (splits := getattr(known, "GGUF_PRE_TOKENIZER_SPLITS", None)) is None:
        raise CannotRun(
            "tokenizers of GGUF files need a transformers with a table of pre-tokenizers, as 5.18 "
            f"has; this is {__version__}",
            hint="pip install 'dakrun[gguf]'",
        )
    return tuple(splits)


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def model_config(metadata: Metadata, dtype: Dtype) -> dict[str, Any]:
    """config.json from the metadata and the tensors' shapes."""
    file, family, get = metadata.file, metadata.family, metadata.get
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if EMBEDDING not in shapes or get("split.count", 1) > 1:
        raise CannotRun(
            f"{metadata.source}: is a part of a model",
            hint="join the parts into one file with llama-gguf-split --merge",
        )
    heads, hidden = get(f"{family}.attention.head_count"), get(f"{family}.embedding_length")
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": int(shapes[EMBEDDING][1]),
        "hidden_size": hidden,
        "intermediate_size": get(f"{family}.feed_forward_length"),
        "num_hidden_layers": get(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get(f"{family}.attention.head_count_kv", heads),
        "head_dim": get(f"{family}.attention.key_length", hidden // heads),
        "max_position_embeddings": get(f"{family}.context_length"),
        # Stored in float32, of which the published decimal is the shortest.
        "rms_norm_eps": decimal(get(f"{family}.attention.layer_norm_rms_epsilon")),
        "rope_theta": decimal(get(f"{family}.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": dtype,
    }
    if family != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config |= {f"{kind}_token_id": token for kind, token in metadata.token_ids().items()}
    _check(metadata, config["head_dim"])
    scaling = _rope_scaling(metadata)
    if ROPE_FACTORS in shapes:
        factors = next(t.data for t in file.tensors if t.name == ROPE_FACTORS)
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": factors.tolist(),
            "long_factor": factors.tolist(),
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    elif scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """RoPE's scaling in config.json's terms; None where there is none.

    As in llama.cpp, a file without a type is scaled linearly; rope.scale_linear is the older name
    of the factor.
    """
    rope, get = f"{metadata.family}.rope.", metadata.get
    kind = get(f"{rope}scaling.type", "linear")
    factor = get(f"{rope}scaling.factor", get(f"{rope}scale_linear", 0.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    scaled: dict[str, Any] = {"rope_type": kind, "factor": decimal(factor) if factor else 1.0}
    if metadata.has(key := f"{rope}scaling.original_context_length"):
        scaled["original_max_position_embeddings"] = get(key)
    for name in ("beta_fast", "beta_slow"):
        if kind == "yarn" and metadata.has(key := f"{rope}scaling.yarn_{name}"):
            scaled[name] = decimal(get(key))
    return scaled


def _check(metadata: Metadata, head_dim: int) -> None:
    """Raise CannotRun for values that no llama, qwen2 or qwen3 here can have."""
    family, get = metadata.family, metadata.get
    expected = {
        f"{family}.rope.dimension_count": head_dim,
        f"{family}.attention.value_length": head_dim,
        f"{family}.attention.causal": True,
        f"{family}.expert_count": 0,
        f"{family}.expert_used_count": 0,
    }
    for key, value in expected.items():
        if (other := get(key, value)) != value:
            raise CannotRun(
                f"{metadata.source}: {key} is {other}, not {value}, which is not supported",
                hint="use a file of a plain llama, qwen2 or qwen3 model",
            )


def decimal(number: float) -> float:
    """The shortest decimal with the float32 value `number`."""
    return next(
        short for digits in range(1, 10)
        if torch.tensor(short := float(f"{number:.{digits}g}"), dtype=torch.float32).item()
        == torch.tensor(number, dtype=torch.float32).item()
    )  # fmt: skip
