"""Results of requests: completions, and errors of rows. Knows nothing of slots and steps."""

import math
from collections.abc import Sequence
from typing import Literal

from dakrun.config import Dtype
from dakrun.engine.progress import RequestState
from dakrun.engine.step import Likeliest
from dakrun.geometry import NONE_ALLOWED
from dakrun.requests import (
    CALL_TOKENS,
    Answer,
    BadRow,
    Completion,
    Continuation,
    Logprobs,
    Request,
    RowError,
    Tokenizer,
    TokenLogprob,
    ToolCall,
    find_calls,
)


def completion(
    r: RequestState, reason: Literal["stop", "length"], tokenizer: Tokenizer | None
) -> Completion:
    """The result of `r`, which ended for that reason."""
    further, reply = max(0, len(r.tokens) - 1), r.request.reply
    params, text, offsets, answer = r.request.params, None, None, None
    if tokenizer:
        tokens = r.tokens
        if tokens and tokens[-1] in params.stop_token_ids:
            tokens = tokens[:-1]
        added = tokenizer.continuation(r.request.prompt_ids, is_chat=reply.is_chat)
        text = added.text(tokens, r.stop)
        answer = _answer(r, tokens, tokenizer, added)
        if params.logprobs is not None:
            offsets = tuple(min(at, len(text)) for at in added.offsets(r.tokens))
        if reply.echo:
            begin, prompt = tokenizer.continuation(()), r.request.prompt_ids
            echoed = begin.text(prompt)
            text = echoed + text
            if offsets is not None:
                offsets = (*begin.offsets(prompt), *(len(echoed) + at for at in offsets))
    return Completion(
        id=r.request.id,
        text=text,
        token_ids=tuple(r.tokens),
        finish_reason="tool_calls" if reason == "stop" and answer and answer.tool_calls else reason,
        prompt_tokens=len(r.request.prompt_ids),
        ttft_s=r.first_token - r.started,
        tpot_s=(r.last_token - r.first_token) / further if further else 0.0,
        reply=reply,
        logprobs=_named(r.logprobs, tokenizer) if params.logprobs is not None else None,
        text_offset=offsets,
        prompt_logprobs=None
        if params.prompt_logprobs is None
        else (None, *_named(r.scores, tokenizer)),
        answer=answer,
        prompt=r.request.prompt,
        prompt_token_ids=r.request.prompt_ids,
    )


def _answer(
    r: RequestState, tokens: Sequence[int], tokenizer: Tokenizer, added: Continuation
) -> Answer | None:
    """The parts of the text of `tokens`; None if it has neither a thought nor calls of tools."""
    reply = r.request.reply
    thought, form = reply.thought, reply.call_format
    if not (thought or form):
        return None
    marks = thought.markers if thought else ()
    text = added.text(tokens, r.stop, keep=marks)
    reasoning, content = thought.split(text) if thought else (None, text)
    count = 0 if reasoning is None else len(r.tokens)
    if thought and reasoning is not None and content is not None:
        count = tokenizer.tokens_through(r.tokens, thought.markers.close, added)
    calls: tuple[ToolCall, ...] = ()
    if form and content is not None:
        spelled = added.text(tokens, r.stop, keep=(*marks, *CALL_TOKENS[form]))
        rest = thought.split(spelled)[1] if thought else spelled
        found = find_calls(rest or "", form, f"{r.request.id}\0{reply.choice}")
        content, calls = found or (content, ())
    if reasoning is None and not calls:
        return None
    return Answer(
        content=content and content.strip(),
        tool_calls=calls[: 1 if reply.one_call else None],
        reasoning=reasoning,
        reasoning_tokens=count,
    )


def no_token(r: RequestState, dtype: Dtype) -> RowError:
    """The error of a request whose newest token, NO_TOKEN or NONE_ALLOWED, could not be chosen."""
    position = len(r.request.prompt_ids) + len(r.tokens) - 1
    if r.tokens[-1] != NONE_ALLOWED:
        return _non_finite(r.request, position, dtype)
    message = f"the row's options forbid every token for {_position_name(position)}"
    return _error(r.request, "no_token_allowed", message)


def no_score(r: RequestState, dtype: Dtype) -> RowError | None:
    """The error of a request if a token of its prompt has no log-probability."""
    for position, ((_, logprob), *_) in enumerate(r.scores, 1):
        if math.isnan(logprob):
            return _non_finite(r.request, position, dtype)
    return None


def _non_finite(request: Request, position: int, dtype: Dtype) -> RowError:
    cause = "the weights may be damaged"
    if dtype == "float16":
        cause += ", or need --dtype bfloat16"
    message = f"the logits of {_position_name(position)} are NaN or infinite; {cause}"
    return _error(request, "non_finite_logits", message)


def _position_name(position: int) -> str:
    return f"the token at position {position} (the first has position 0)"


def _error(request: Request, code: str, message: str) -> RowError:
    return RowError(
        id=request.id, line=request.line, code=code, message=message, reply=request.reply
    )


def refused(request: Request, bad: BadRow) -> RowError:
    """The error of a request that cannot begin."""
    return _error(request, bad.code, str(bad))


def too_long(request: Request, new: int, most: int) -> RowError:
    """The error of a request of up to `new` tokens where the KV cache holds `most` positions."""
    message = (
        f"its {len(request.prompt_ids)} prompt and up to {new} new tokens do not fit in "
        f"the KV cache: there is room for {most} tokens; raise --hbm-budget or --host-budget, or "
        "lower --batch-size"
    )
    return _error(request, "kv_cache_too_small", message)


def _named(found: Sequence[Likeliest], tokenizer: Tokenizer | None) -> tuple[Logprobs, ...]:
    """Log-probabilities with the texts of their tokens."""
    text = tokenizer.token_text if tokenizer else lambda _: None
    named = ([TokenLogprob(token, value, text(token)) for token, value in one] for one in found)
    return tuple(Logprobs(chosen, tuple(top)) for chosen, *top in named)
