"""Answers of a model: a request's first state, the token that ends it, and its result.

Knows requests, end tokens, the tokenizer and grammars; knows nothing of slots and steps.
"""

from dataclasses import replace
from typing import Literal

from dakrun.engine.adjustments import History
from dakrun.engine.progress import RequestState
from dakrun.engine.results import completion, no_score, no_token
from dakrun.engine.sampler import request_seed
from dakrun.engine.step import Sampling
from dakrun.grammars import Grammars, Guidance, StructuredOutputsParams, is_valid
from dakrun.plan import Plan
from dakrun.requests import (
    Completion,
    Request,
    RowError,
    StopStrings,
    Tokenizer,
    check_ids,
    check_tokens,
)

Reason = Literal["stop", "length", "error"]  # why a request ends


class Answers:
    """Answers of the model that `plan` is for; texts need its `tokenizer`, their form `grammars`.

    `eos` are its end tokens.
    """

    def __init__(self, plan: Plan, tokenizer: Tokenizer | None, grammars: Grammars | None) -> None:
        self.eos = frozenset(plan.model.eos_token_ids)
        self._dtype, self._max_len = plan.model.dtype, plan.workload.max_model_len
        self._vocab_size = plan.model.vocab_size
        self._tokenizer, self._grammars = tokenizer, grammars

    def begin(self, request: Request) -> RequestState:
        """`request` as it arrives, not in a slot yet.

        Raises BadRow if it has, or its parameters name, a token that is not in the vocabulary.
        """
        length = len(request.prompt_ids)
        if not 0 < length < self._max_len:
            raise ValueError(f"expected a prompt of 1 to {self._max_len - 1} tokens, got {length}")
        params = request.params
        check_ids(request.prompt_ids, self._vocab_size)
        check_tokens(params, self._vocab_size)
        stop = None
        if params.stop:
            if self._tokenizer is None:
                raise ValueError("stop strings need a tokenizer")
            is_chat = request.reply.is_chat
            added = self._tokenizer.continuation(request.prompt_ids, is_chat=is_chat)
            stop = StopStrings(params.stop, added.spelled, request.reply.thought, params.min_tokens)
        if any(isinstance(word, str) for word in params.bad_words):
            raise ValueError("expected bad_words as token ids")
        limit, tokens = params.limit(self._max_len - length), list[int]()
        history = History(request.prompt_ids, tokens, self.eos)
        seed, guidance = request_seed(params.seed, request.id), self._guidance(request)
        sampling = Sampling(params, seed, history, limit, guidance)
        return RequestState(request, stop, sampling, limit, request.prompt_ids, tokens=tokens)

    def finish_reason(self, r: RequestState) -> Reason | None:
        """Why `r` ends with the newest of its tokens, or None."""
        params, token = r.request.params, r.tokens[-1]
        if token < 0:
            return "error"
        if not r.limit:
            return "length"
        if token in self.eos and (not params.ignore_eos or params.structured_outputs):
            return "stop"
        if token in params.stop_token_ids:
            return "stop"
        if r.stop is not None and r.stop.hit(r.tokens):
            return "stop"
        return "length" if len(r.tokens) == r.limit else None

    def result(self, r: RequestState, reason: Reason) -> Completion | RowError:
        """The result of `r`, which has ended; drops what it has beyond its limit."""
        if reason == "error":
            return no_token(r, self._dtype)
        if error := no_score(r, self._dtype):
            return error
        del r.tokens[r.limit :], r.logprobs[r.limit :]
        result = completion(r, reason, self._tokenizer)
        form = r.request.params.structured_outputs
        if form is None or self._grammars is None:
            return result
        # A grammar allows an end token only where an answer is whole.
        whole = not self.eos.isdisjoint(r.tokens[-1:])
        return replace(result, valid=_has_form(result, form, self._grammars, whole=whole))

    def _guidance(self, request: Request) -> Guidance | None:
        """What guides the tokens of `request`; None if all are allowed.

        Raises UsageError for a form that no grammar can follow, and ValueError without grammars.
        """
        params, thought = request.params, request.reply.thought
        form = params.structured_outputs
        budget = params.thinking_token_budget if thought else None
        if form is None and budget is None:
            return None
        if self._grammars is None:
            raise ValueError("the form of answers needs a tokenizer")
        if form is not None:
            self._grammars.matcher(form)
        markers, begun = (thought.markers, thought.begun) if thought else (None, False)
        return Guidance(self._grammars, form, markers, begun, budget)


def _has_form(
    result: Completion, form: StructuredOutputsParams, grammars: Grammars, *, whole: bool
) -> bool:
    """Whether an answer is finished and has its form; `whole` says that a grammar let it end."""
    if result.finish_reason == "length":
        return False
    answer = result.answer
    text = (answer.content if answer else result.text) or ""
    if not (whole or grammars.accepts(form, text)):
        return False
    return form.strict or form.kind != "json" or is_valid(form, text)
