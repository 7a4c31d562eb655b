"""Grammars of a model's answers, compiled by llguidance once for each form that rows ask for.

Imports llguidance and jsonschema late. Knows the tokenizer's JSON, no rows.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cached_property
from threading import Lock, Thread
from typing import Any

from dakrun.errors import UsageError
from dakrun.grammars.structured_outputs import StructuredOutputsParams

MAX_COMPILED = 4096  # compiled forms that are kept
MAX_BLANKS = 8  # characters between two tokens of JSON
WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}"
_HINT = "leave out what is named, or use another schema, regex or grammar"


def llguidance_grammar(form: StructuredOutputsParams) -> str:
    """`form` as llguidance reads it. Raises UsageError for GBNF that cannot be converted."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if form.kind in ("json", "json_object"):
        options: Any = json_options(strict=form.strict)
        return str(LLMatcher.grammar_from_json_schema(form.schema, overrides=options))
    if form.kind == "regex":
        return str(LLMatcher.grammar_from_regex(form.source))
    if form.kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(form.source))
        return str(LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}"))
    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(form.source)))
    except Exception as problem:  # GBNF's own errors, and others of a malformed text
        raise UsageError(f"the grammar cannot be read as GBNF: {problem}", hint=_HINT) from None


def json_options(*, strict: bool) -> dict[str, Any]:
    """llguidance's options for JSON schemas; unless `strict`, keywords may be left out."""
    return {
        "whitespace_pattern": WHITESPACE,
        "lenient": not strict,
        "coerce_one_of": not strict,
    }


def check_form(form: StructuredOutputsParams, tokenizer: Any = None) -> str:
    """The llguidance grammar of `form`; UsageError, which names the cause, if there is none.

    With a `tokenizer`, an LLTokenizer, what the grammar says of special tokens is checked, too.
    """
    from llguidance import LLMatcher

    if form.kind == "json" and form.source == "false":
        raise UsageError("no answer can satisfy the schema false", hint=_HINT)
    grammar = llguidance_grammar(form)
    if problem := LLMatcher.validate_grammar(grammar, tokenizer):
        raise _refusal(form, problem)
    return grammar


class Grammars:
    """The grammars of a model of `vocab_size` tokens that ends answers with `end_tokens`.

    `tokenizer_json` gives the tokenizer as a Hugging Face tokenizer.json has it; None if there is
    none. Tokens beyond its vocabulary are forbidden in answers that have a form.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str | None], vocab_size: int, end_tokens: Iterable[int]
    ) -> None:
        self._tokenizer_json, self.vocab_size = tokenizer_json, vocab_size
        self._end_tokens = [token for token in end_tokens if token < vocab_size]
        self._compiled: OrderedDict[StructuredOutputsParams, Future[Any]] = OrderedDict()
        self._waiting: deque[tuple[StructuredOutputsParams, Future[Any]]] = deque()
        self._worker: Thread | None = None
        self._lock = Lock()

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer as an LLTokenizer. Raises UsageError."""
        from llguidance import LLTokenizer

        hint = "use a model with a tokenizer.json of byte-level or byte-fallback tokens"
        if (source := self._tokenizer_json()) is None:
            raise UsageError("the form of answers needs a tokenizer.json", hint=hint)
        if not self._end_tokens:
            raise UsageError("the model has no end token, which answers end with", hint=hint)
        try:
            return LLTokenizer(source, n_vocab=self.vocab_size, eos_token=self._end_tokens)
        except ValueError as problem:
            raise UsageError(
                f"llguidance cannot use the model's tokenizer ({problem})", hint=hint
            ) from None

    def prepare(self, forms: Iterable[StructuredOutputsParams]) -> None:
        """Compile forms beside other work, as many as are kept; each only once."""
        with self._lock:
            for form in forms:
                if form not in self._compiled and len(self._compiled) < MAX_COMPILED:
                    self._compiled[form] = Future()
                    self._waiting.append((form, self._compiled[form]))
            if self._waiting and self._worker is None:
                self._worker = Thread(target=self._work, name="grammars", daemon=True)
                self._worker.start()

    def matcher(self, form: StructuredOutputsParams) -> Any:
        """An LLMatcher of answers of that form, at their start. Raises UsageError."""
        with self._lock:
            found = self._compiled.pop(form, None)
            is_new = found is None or found.cancel()  # one that waits is compiled here
            if found is None or is_new:
                found = Future()
            if len(self._compiled) >= MAX_COMPILED:
                self._compiled.popitem(last=False)
            self._compiled[form] = found  # the newest
        if is_new:
            self._compile(form, found)
        why = found.exception()
        if isinstance(why, UsageError):  # anew, since each raising adds to an error's traceback
            raise UsageError(str(why), hint=why.hint) from None
        return found.result().deep_copy()

    def _work(self) -> None:
        """Compile what waits, then end."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._worker = None
                    return
                form, found = self._waiting.popleft()
            if found.set_running_or_notify_cancel():
                self._compile(form, found)

    def accepts(self, form: StructuredOutputsParams, text: str) -> bool:
        """Whether `text` is a whole answer of that form."""
        matcher, tokens = self.matcher(form), self.tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    def _compile(self, form: StructuredOutputsParams, found: "Future[Any]") -> None:
        """Let `found` have the matcher of `form`, or what is wrong with it."""
        from llguidance import LLMatcher

        try:
            tokenizer = self.tokenizer
            matcher = LLMatcher(tokenizer, check_form(form, tokenizer), log_level=0)
            if matcher.is_error():
                raise _refusal(form, matcher.get_error())
            found.set_result(matcher)
        except BaseException as problem:
            found.set_exception(problem)
            if not isinstance(problem, Exception):  # such as Ctrl-C
                raise


def is_valid(form: StructuredOutputsParams, text: str) -> bool:
    """Whether `text`, all of an answer that has ended, has the form of a JSON schema."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = form.schema
    try:
        # An empty registry: nothing that a schema refers to is fetched from elsewhere.
        validator = validator_for(schema)(schema, registry=Registry())
        return bool(validator.is_valid(json.loads(text)))
    except (ValueError, RecursionError, SchemaError, Unresolvable):
        return False


_NAMES = {
    "json": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
}


def _refusal(form: StructuredOutputsParams, problem: str) -> UsageError:
    """The error for a form that llguidance refuses for that reason."""
    reason = " ".join(problem.split())[:300]
    return UsageError(f"the {_NAMES[form.kind]} cannot be followed: {reason}", hint=_HINT)
