"""Makes a Request of a row that was read ahead, in this process or in a worker that was sent it.

Knows the row formats, and no files; the fields are in native_rows.py and openai_rows.py.
"""

import marshal
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.requests.json_rows import id_of
from dakrun.requests.lengths import RowLengths
from dakrun.requests.native_rows import NATIVE, ParsedRow, RowFormat
from dakrun.requests.openai_rows import BATCH, is_batch_row
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Request, RowError

Content = dict[str, Any] | str | tuple[str, str]
"""The fields of a JSON row, a text, or the code and message of a line that is neither."""


class AheadRow(NamedTuple):
    """A row that has been read, but not made a Request. Rows begin in the order of these tuples.

    First come rows of an earlier group of LOOK_AHEAD rows, so that none waits for ever; then rows
    that may take the most decode steps; then rows with the longest prompts.

    `number` is the row's line, `id` the id of its result. `kind` is the format of the file's rows,
    None before the first JSON row. `packed` is the content as bytes that marshal writes, for
    processes of the same version of Python; `digest` is that of row_digests.py. LookAhead keeps
    `packed` in its spool, at `place`.
    """

    group: int
    minus_new: int
    minus_prompt: int
    number: int
    id: str
    choices: int
    shared: int
    nbytes: int
    kind: RowFormat | None
    digest: int = 0
    packed: bytes = b""
    place: int = 0

    @property
    def content(self) -> Content:
        """What the row's line says."""
        content: Content = marshal.loads(self.packed)
        return content

    @property
    def lengths(self) -> RowLengths:
        """The row's lengths, as they are estimated."""
        return RowLengths(-self.minus_prompt, -self.minus_new, self.choices, self.shared)


def own_id(content: Content, number: int) -> str:
    """The id that the row on line `number` has by itself; line-N if it has none that is valid."""
    given = None
    if isinstance(content, dict):
        with suppress(BadRow):
            given = id_of(content, kind_of(content).id_field)
    return given or f"line-{number}"


def kind_of(fields: dict[str, Any]) -> RowFormat:
    """The format of a JSON row."""
    return BATCH if is_batch_row(fields) else NATIVE


def parse_row(row: AheadRow, defaults: SamplingParams, rules: PromptRules) -> Request | RowError:
    """The row as a Request, or its error if it is malformed or breaks `rules`.

    `defaults` are for parameters that the row lacks. A row whose `id` is not its own is an error:
    an earlier row has that.
    """
    content, is_integer = row.content, False
    try:
        if (own := own_id(content, row.number)) != row.id:
            raise BadRow("duplicate_id", f"an earlier row has the id {own!r}")
        if isinstance(content, tuple):
            raise BadRow(*content)
        if isinstance(content, str):
            parsed = [ParsedRow(rules.encode(content), defaults)]
        else:
            kind = kind_of(content)
            id_of(content, kind.id_field)
            is_integer = kind is NATIVE and isinstance(content.get("id"), int)
            if row.kind is not None and kind.name != row.kind.name:
                raise BadRow(
                    "mixed_formats",
                    f"the row is {kind.name}, the rows before it are {row.kind.name}",
                )
            parsed = kind.parse(content, defaults, rules)
        params = rules.checked_params(parsed[0].params)
        if params is not parsed[0].params:
            words = params.bad_words
            parsed = [one._replace(params=replace(one.params, bad_words=words)) for one in parsed]
    except BadRow as bad:
        return _error(row, bad.code, str(bad), is_integer)
    except UsageError as bad:
        return _error(row, "invalid_field", f"{bad}; {bad.hint}", is_integer)
    first, *further = (
        Request(
            id=row.id,
            line=row.number,
            nbytes=row.nbytes,
            digest=row.digest,
            prompt_ids=choice.prompt_ids,
            params=choice.params,
            reply=replace(choice.reply, integer_id=is_integer),
        )
        for choice in parsed
    )
    return replace(first, further=tuple(further))


def _error(row: AheadRow, code: str, message: str, is_integer: bool = False) -> RowError:
    return RowError(
        id=row.id,
        line=row.number,
        code=code,
        message=message,
        reply=replace((row.kind or NATIVE).reply, integer_id=is_integer),
        nbytes=row.nbytes,
        digest=row.digest,
    )
