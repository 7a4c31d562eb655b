"""Prompt files read with a tokenizer of bytes and small limits."""

from pathlib import Path
from typing import Any

from dakrun.config import SamplingParams
from dakrun.requests import PromptRules, Request, RequestReader, RowError

VOCAB, MAX_LEN, POSITIONS = 300, 20, 64


class ByteTokenizer:
    """A begin token (1), then one token for each byte; "<oov>" becomes an id beyond the model."""

    def encode(self, text: str) -> tuple[int, ...]:
        if text == "<none>":
            return ()
        return (1, VOCAB) if text == "<oov>" else (1, *text.encode())


RULES = PromptRules(
    vocab_size=VOCAB,
    max_model_len=MAX_LEN,
    max_positions=POSITIONS,
    tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
)


def read(
    source: str | Path, rules: PromptRules = RULES, **changes: Any
) -> list[Request | RowError]:
    return list(open_reader(source, **changes).rows(rules))


def open_reader(source: str | Path, **changes: Any) -> RequestReader:
    return RequestReader(source, **{"defaults": SamplingParams(max_tokens=5)} | changes)
