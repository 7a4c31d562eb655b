"""A tiny byte-level tokenizer, in the files that OPT checkpoints have."""

import json
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

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
