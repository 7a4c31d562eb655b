"""The rows of a prompt file, checked before a run: for `dakrun plan -i` and `dakrun validate`."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dakrun.errors import CannotRun, DakrunError, UsageError

if TYPE_CHECKING:
    from dakrun.config import ModelConfig, SamplingParams
    from dakrun.plan import ExpectedRun
    from dakrun.requests import PromptRules, RowCheck


def model_rules(
    config: "ModelConfig",
    folder: Path | None,
    max_model_len: int,
    chat_template: str | None = None,
) -> "PromptRules":
    """The rules of a model, with the tokenizer of its `folder`; estimated if that has none."""
    from dakrun.requests import EstimatedRules, PromptRules, Tokenizer

    tokenizer = None
    if folder is not None and folder.is_dir() and Tokenizer.is_in(folder):
        tokenizer = Tokenizer.load(folder, chat_template=chat_template)
    return (PromptRules if tokenizer else EstimatedRules).of(config, max_model_len, tokenizer)


def check_source(
    source: str, params: "SamplingParams", rules: "PromptRules", *, whole: bool = False
) -> "tuple[ExpectedRun, RowCheck]":
    """The run of a file's rows that can run, and what check_rows finds.

    Raises UsageError for a pipe that is not standard input ("-").
    """
    from dakrun.requests import RequestReader, check_rows

    with _on_disk(source) as path, RequestReader(path, defaults=params) as reader:
        found = check_rows(reader, rules, whole=whole)
    if found is None:
        raise UsageError(
            f"{source}: a pipe, whose size is not known",
            hint="write the prompts to a file, and give that to -i, or pipe them to -i -",
        )
    return found


@contextmanager
def _on_disk(source: str) -> Iterator[str]:
    """The path of `source`; standard input is copied to a temporary file."""
    if source != "-":
        yield source
        return
    if sys.stdin is None:
        raise UsageError("standard input is closed", hint="give -i a file, or pipe prompts in")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stdin"
        try:
            with path.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        except OSError as problem:
            raise CannotRun(
                f"standard input cannot be copied to {folder} ({problem.strerror})",
                hint="set TMPDIR to a folder with room, or give -i a file",
            ) from None
        try:
            yield str(path)
        except DakrunError as problem:
            text = str(problem).replace(str(path), "standard input")
            raise type(problem)(text, hint=problem.hint) from None
