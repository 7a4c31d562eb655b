"""Prompt files read with a tokenizer of bytes and small limits."""

from collections.abc import Iterator
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
    """All rows of a source, in the order of its lines."""
    return in_order(open_reader(source, **changes), rules)


def in_order(reader: RequestReader, rules: PromptRules = RULES) -> list[Request | RowError]:
    """All rows of `reader`, in the order of their lines."""
    return sorted(longest_first(reader, rules), key=lambda row: row.line)


def longest_first(
    reader: RequestReader, rules: PromptRules = RULES
) -> Iterator[Request | RowError]:
    """The rows of `reader` as they come, waiting for those that have not arrived."""
    for row in reader.rows(rules):
        if row is None:
            reader.wait()
        else:
            yield row


def open_reader(source: str | Path, **changes: Any) -> RequestReader:
    return RequestReader(source, **{"defaults": SamplingParams(max_tokens=5)} | changes)
