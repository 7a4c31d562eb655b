"""The rows of a prompt file checked before anything runs: errors by reason, and tokens in all.

Reads the first LOOK_AHEAD rows, or all, in the order of the file. Without the model's tokenizer,
lengths of texts are estimated as in lengths.py, and whether a text can be encoded is all that is
known of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dakrun.config import MAX_SIZE, SamplingParams
from dakrun.errors import UsageError
from dakrun.grammars import StructuredOutputsParams, check_form
from dakrun.plan import ExpectedRun
from dakrun.requests import look_ahead
from dakrun.requests.chat_template import PLAIN, TemplateOptions
from dakrun.requests.lengths import RowLengths, chat_text, tokens_of
from dakrun.requests.native_rows import error_row
from dakrun.requests.prompts import BadRow, PromptRules, check_encodable, check_tokens
from dakrun.requests.request import RowError

if TYPE_CHECKING:
    from dakrun.requests.reader import RequestReader

SHOWN_ERRORS = 10


@dataclass(frozen=True, kw_only=True)
class EstimatedRules(PromptRules):
    """The rules of a model whose tokenizer is not at hand; by default, of any model."""

    vocab_size: int = MAX_SIZE
    max_model_len: int = MAX_SIZE
    max_positions: int = MAX_SIZE

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """As many zeros as `text` has tokens by estimate."""
        check_encodable(text, "the prompt")
        if (tokens := tokens_of(text)) >= self.max_model_len:
            raise BadRow(
                "prompt_too_long",
                f"the prompt has about {tokens} tokens by its characters, but only "
                f"{self.max_model_len - 1} and a new one fit into the maximum length of "
                f"{self.max_model_len}",
            )
        return (0,) * tokens

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = PLAIN
    ) -> str:
        """The texts of messages and tools."""
        return chat_text({"messages": messages, "tools": options.tools}) or ""

    def checked_params(self, params: SamplingParams) -> SamplingParams:
        """`params`: there may be a tokenizer for their strings.

        Raises BadRow for a `structured_outputs` of which no grammar can be made, for tokens outside
        the vocabulary, and for bad words that cannot be encoded.
        """
        if params.structured_outputs is not None and (why := _problem(params.structured_outputs)):
            raise BadRow("invalid_grammar", why)
        for word in params.bad_words:
            if isinstance(word, str):
                check_encodable(word, "a bad word")
        check_tokens(params, self.vocab_size)
        return params


@lru_cache(maxsize=4096)
def _problem(form: StructuredOutputsParams) -> str:
    """Why no grammar can follow `form`; empty if one can."""
    try:
        check_form(form)
    except UsageError as problem:
        return f"{problem}; {problem.hint}"
    return ""


@dataclass(frozen=True)
class Reason:
    """Why `rows` rows cannot run; `line` and `message` are those of the first of them."""

    code: str
    rows: int
    line: int
    message: str


@dataclass(frozen=True)
class RowCheck:
    """What was found of the `rows` first rows; `lines` are those of rows that cannot run.

    `whole`: these are all rows of the file. `errors` are the first SHOWN_ERRORS of all. The rows
    that can run have `prompt_tokens`, each prompt counted once, and `new_tokens` at most, in all
    their choices.
    """

    rows: int
    whole: bool
    reasons: tuple[Reason, ...]
    lines: frozenset[int]
    errors: tuple[RowError, ...]
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        of = f"{self.rows:,} row{'s' * (self.rows != 1)}"
        of = of if self.whole else f"the first {of}"
        if not self.rows:
            return "there are no rows"
        if not self.lines:
            return f"all of {of} can run"
        reasons = "; ".join(
            f"{reason.rows:,} {reason.code} (line {reason.line}: {reason.message})"
            for reason in self.reasons
        )
        return f"{len(self.lines):,} of {of} cannot run: {reasons}"

    def as_dict(self) -> dict[str, Any]:
        """The check as JSON-ready data."""
        return {
            "checked": self.rows,
            "whole_file": self.whole,
            "cannot_run": len(self.lines),
            "reasons": [vars(reason) for reason in self.reasons],
            "first_errors": [error_row(error) for error in self.errors],
            "prompt_tokens": self.prompt_tokens,
            "max_new_tokens": self.new_tokens,
        }


def check_rows(
    reader: "RequestReader", rules: PromptRules, *, whole: bool = False
) -> tuple[ExpectedRun, RowCheck] | None:
    """The run of the rows that can run, and a check of the file; None for a pipe.

    Reads the first LOOK_AHEAD rows, from which the run follows; with `whole` checks the rest, too.
    """
    if reader.bytes_total is None:
        return None
    parsed, run, count, prompt_tokens, new_tokens = reader.in_order(rules), None, 0, 0, 0
    able, lines = list[RowLengths](), set[int]()
    reasons, errors = dict[str, Reason](), list[RowError]()
    for lengths, row in parsed:
        count += 1
        if isinstance(row, RowError):
            lines.add(row.line)
            known = reasons.get(row.code) or Reason(row.code, 0, row.line, row.message)
            reasons[row.code] = replace(known, rows=known.rows + 1)
            if len(errors) < SHOWN_ERRORS:
                errors.append(row)
        else:
            choices = (row, *row.further)
            prompt_tokens += sum(len(one.prompt_ids) for one in choices[:: row.reply.n])
            rooms = ((one, rules.max_model_len - len(one.prompt_ids)) for one in choices)
            new_tokens += sum(one.params.limit(room) for one, room in rooms)
            if run is None:
                able.append(lengths)
        if count == look_ahead.LOOK_AHEAD:
            run = _run(reader, able, ended=False)
            if not whole:
                break
    check = RowCheck(
        rows=count,
        whole=next(parsed, None) is None,
        reasons=tuple(reasons.values()),
        lines=frozenset(lines),
        errors=tuple(errors),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
    )
    return run or _run(reader, able, ended=True), check


def _run(reader: "RequestReader", rows: Sequence[RowLengths], *, ended: bool) -> ExpectedRun:
    """The run of `rows`, the longest first as in a run."""
    return reader.run_of(sorted(rows, key=lambda row: (-row.new, -row.prompt)), ended=ended)
