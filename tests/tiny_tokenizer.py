"""A tiny byte-level tokenizer, in the files that OPT checkpoints have."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from tokenizers.pre_tokenizers import ByteLevel

from dakrun.requests import Tokenizer

BYTES = sorted(ByteLevel.alphabet())
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def make_tokenizer_files(directory: Path, **config: object) -> Path:
    """A byte-level BPE tokenizer in the files that OPT checkpoints have; "he" is one token."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *BYTES, "he"])}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\nh e\n")
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 8,
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "opt"}))
    return directory


@functools.cache
def chat_tokenizer(template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer with a chat template and more special tokens.

    Tests share it: the process that renders its chats takes most of a second to start.
    """
    with TemporaryDirectory() as name:
        folder = make_tokenizer_files(Path(name), chat_template=template)
        if special:
            auto = transformers.AutoTokenizer.from_pretrained(folder)
            auto.add_special_tokens({"extra_special_tokens": list(special)})
            auto.save_pretrained(folder)
        return Tokenizer.load(folder)
