"""The engine's inputs and outputs: requests, completions and row errors; and sets of their ids.

Knows neither files nor models.
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.grammars import StructuredOutputsParams
from dakrun.requests.thoughts import Thought
from dakrun.requests.tool_calls import CallFormat, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Reply:
    """The format of a result row, and which of its choices a request's completion is.

    The format is native, or OpenAI's, which repeats the request's `model` and may have several
    choices, `n` for each of the row's prompts. The request is for number `choice`, from 0, of
    `choices` in all; those of one prompt are neighbours. `of_messages` marks a native row that has
    messages, `integer_id` one whose id is an integer, which a result repeats as one. `continues`
    marks a completion that continues the last message. `call_format` is that of the calls of tools
    that an answer may have, `one_call` says that only the first of them counts, `must_call` is the
    form of an answer that must have one. `thought` is the
    thought that an answer may begin with. `echo` says that the text begins with the prompt's.
    """

    kind: Literal["native", "completion", "chat"] = "native"
    model: str | None = None
    choice: int = 0
    choices: int = 1
    n: int = 1
    of_messages: bool = False
    integer_id: bool = False
    continues: bool = False
    call_format: CallFormat | None = None
    one_call: bool = False
    must_call: StructuredOutputsParams | None = None
    thought: Thought | None = None
    echo: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether it answers messages, in any format, with a message of its own."""
        return (self.kind == "chat" or self.of_messages) and not self.continues


@dataclass(frozen=True, kw_only=True)
class Request:
    """A tokenized prompt and how to continue it; `line` is its 1-based line in the input.

    `further` are the requests for the other choices of its row, which have the same id. `nbytes`
    is the row's share of the input file, `digest` that of row_digests.py. `prompt` is the text
    of the prompt, where a result repeats it. Raises UsageError if `params` ask for more than one
    completion: each has a Request of its own.
    """

    id: str
    line: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    reply: Reply = Reply()
    further: tuple["Request", ...] = ()
    nbytes: int = field(default=0, compare=False)
    digest: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise UsageError(
                f"request {self.id!r}: n is {self.params.n}, and a Request has one completion",
                hint="give the prompt and its SamplingParams to LLM.generate or LLM.stream",
            )


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability, and its text, None without a tokenizer."""

    token_id: int
    logprob: float
    text: str | None


class Logprobs(NamedTuple):
    """The log-probability of a chosen token, and those of the `top` likeliest there."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Answer(NamedTuple):
    """The parts of an answer's text, without blanks around them.

    `reasoning` is the thought that it begins with; None without one. It has `reasoning_tokens`,
    with its markers. `content` is what is neither thought nor call; None within a thought.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    reasoning_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. `text` ends before EOS or the stop string; None without a tokenizer.

    `logprobs` has an element for each of `token_ids`; it is None if the request asked for none. So
    has `text_offset`, where each token begins in `text`; it is None without a text, too. Where the
    reply is to `echo` the prompt, `text` begins with the prompt's, `text_offset` with its tokens'.
    `prompt_logprobs` has an element for each token of the prompt, None for the first.
    `answer` has the parts of the text where it has a thought or calls of tools, else None.
    `valid` says whether an answer that must have a form is finished and has it; else it is None.
    `ttft_s` is the time from the request's start to its first token, `tpot_s` the mean time of
    each later token (0 if there is none), both in seconds.

    The result of a row that asked for several choices is the completion of the first, which has the
    `further` ones. `choices` are all of them, this one first. Results of the Python API also have
    the `prompt` (None if it was given as token ids). `outputs`, `request_id`, `index` and
    `finished` are vLLM's names.
    """

    id: str
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    ttft_s: float
    tpot_s: float
    reply: Reply = Reply()
    logprobs: tuple[Logprobs, ...] | None = None
    text_offset: tuple[int, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    answer: Answer | None = None
    valid: bool | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    further: tuple["Completion", ...] = ()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools in the text."""
        return self.answer.tool_calls if self.answer else ()

    @property
    def choices(self) -> tuple["Completion", ...]:
        """All completions of the prompt: as many as its SamplingParams.n."""
        return (self, *self.further)

    @property
    def outputs(self) -> tuple["Completion", ...]:
        """The `choices`."""
        return self.choices

    @property
    def request_id(self) -> str:
        """The `id`: for LLM.generate, the index of the prompt."""
        return self.id

    @property
    def index(self) -> int:
        """The number of this completion among the `choices`."""
        return self.reply.choice

    @property
    def finished(self) -> bool:
        """True: there are no others."""
        return True


@dataclass(frozen=True, kw_only=True)
class RowError:
    """An input row that cannot be run: `code` is for programs, `message` for people.

    `nbytes` and `digest` are as in Request.
    """

    id: str
    line: int
    code: str
    message: str
    reply: Reply = Reply()
    nbytes: int = field(default=0, compare=False)
    digest: int = field(default=0, compare=False)


class IdSet:
    """A set of row ids in 12 to 24 bytes each, however long the ids: a hash table of 64-bit hashes.

    Only the hashes are kept: among a million ids, two collide with a probability of 3e-8.
    """

    def __init__(self) -> None:
        self._table = _empty(1 << 10)  # open addressing; 0 marks a free slot
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, id: str) -> bool:
        return self._table[self._slot(id_hash(id))] != 0

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return len(self._table) * self._table.itemsize

    def add(self, id: str) -> bool:
        """Insert `id`; True if it is new."""
        value = id_hash(id)
        slot = self._slot(value)
        if self._table[slot]:
            return False
        self._table[slot] = value
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            self._grow()
        return True

    def _slot(self, value: int) -> int:
        """The slot that holds `value`, or the free slot to insert it at."""
        table, mask = self._table, len(self._table) - 1
        slot = value & mask
        while table[slot] not in (0, value):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old, self._table = self._table, _empty(2 * len(self._table))
        for value in old:
            if value:
                self._table[self._slot(value)] = value


def _empty(slots: int) -> "array[int]":
    return array("Q", [0]) * slots


def id_hash(id: str) -> int:
    """A 64-bit hash of `id` that is never 0."""
    data = id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1
