"""The ids of a tokenizer.json are those of the file, whatever class its configuration names."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, normalizers, processors

from dakrun.requests import Tokenizer

WORDS = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "x", "\u2581a", "\u2581\u2581", "y"]
MERGES = [("\u2581", "a"), ("\u2581", "\u2581")]


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_a_file_in_the_style_of_llama_2(
    tmp_path: Path, kind: str, named: bool, begins: bool
) -> None:
    vocab = {word: i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, MERGES, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    made.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if named else {}
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    config = {"tokenizer_class": kind, "legacy": True, "chat_template": template, **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer, begin = Tokenizer.load(tmp_path), [1] * begins
    expected = {
        " a": [3, 7],
        "  a": [8, 7],
        "a": [7],
        "x</s> y": [3, 6, 2, 8, 9],
        "": [],
    }
    for text, ids in expected.items():
        assert list(tokenizer.encode(text)) == begin + ids == made.encode(text).ids
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat([{"role": "user", "content": "a"}])[0] == 1
    assert tokenizer.decode([7, 4]) == "aa" and tokenizer.continuation([4]).text([7]) == " a"
