"""Results of OpenAI Batch rows: response bodies of completions and chat completions, and errors.

Knows neither files nor requests' fields, which are in openai_rows.py.
"""

import hashlib
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from dakrun.requests.request import Completion, Logprobs, RowError, TokenLogprob


def completion_row(first: Completion) -> dict[str, Any]:
    """The result row of a Batch row with all its choices, of which `first` has the others.

    Its ids are hashes of custom_id. As OpenAI counts, `usage` has each prompt once and all
    completions.
    """
    choices = first.choices
    key, is_chat = _key(first.id), first.reply.kind == "chat"
    prompt_tokens = sum(choice.prompt_tokens for choice in choices[:: first.reply.n])
    new = sum(len(choice.token_ids) for choice in choices)
    thoughts = [one.answer for one in choices if one.answer and one.answer.reasoning is not None]
    details = {"reasoning_tokens": sum(one.reasoning_tokens for one in thoughts)}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": first.reply.model,
        "choices": [_choice(choice, is_chat=is_chat) for choice in choices],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
            **({"completion_tokens_details": details} if thoughts else {}),
        },
    }
    return {
        "id": f"batch_req_{key}",
        "custom_id": first.id,
        "response": {"status_code": 200, "request_id": f"req_{key}", "body": body},
        "error": None,
    }


def error_row(error: RowError) -> dict[str, Any]:
    """The result row of a Batch row that could not be run; `line` is not in OpenAI's format."""
    return {
        "id": f"batch_req_{_key(error.id)}",
        "custom_id": error.id,
        "response": None,
        "error": {"code": error.code, "message": error.message, "line": error.line},
    }


def _choice(completion: Completion, *, is_chat: bool) -> dict[str, Any]:
    """A choice; without a tokenizer it has no text but `token_ids`, not in OpenAI's format."""
    choice: dict[str, Any] = {"index": completion.reply.choice}
    if is_chat:
        choice["message"] = _message(completion)
    else:
        choice["text"] = completion.text
    if completion.text is None:
        choice["token_ids"] = (*_echoed(completion), *completion.token_ids)
    shown = None
    if completion.logprobs is not None:
        logprobs = completion.logprobs
        shown = _chat_logprobs(logprobs) if is_chat else _text_logprobs(completion, logprobs)
    return choice | {"finish_reason": completion.finish_reason, "logprobs": shown}


def _message(completion: Completion) -> dict[str, Any]:
    """The assistant's message; beside a thought or calls of tools its content may be null."""
    if (answer := completion.answer) is None:
        return {"role": "assistant", "content": completion.text}
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning is not None:  # which has two names
        message |= dict.fromkeys(("reasoning", "reasoning_content"), answer.reasoning)
    if answer.tool_calls:
        message["tool_calls"] = [call.as_dict() for call in answer.tool_calls]
    return message


def _text_logprobs(completion: Completion, logprobs: Sequence[Logprobs]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions; offsets are those of its text's characters.

    Without a text, they are those of the joined names. With `echo` those of the prompt come first;
    its first token has none.
    """
    offsets, first = completion.text_offset, list[str]()
    if completion.reply.echo and completion.prompt_logprobs:
        logprobs = [one for one in completion.prompt_logprobs if one] + list(logprobs)
        first.append(f"token_id:{completion.prompt_token_ids[0]}")
        if completion.text is not None and offsets is not None:
            first = [completion.text[: (*offsets, len(completion.text))[1]]]
    names = first + [_name(chosen) for chosen, _ in logprobs]
    none = [None for _ in first]
    return {
        "tokens": names,
        "token_logprobs": none + [_rounded(chosen) for chosen, _ in logprobs],
        "top_logprobs": none + [_by_name((*top, chosen)) for chosen, top in logprobs],
        "text_offset": [0, *accumulate(map(len, names))][: len(names)]
        if offsets is None
        else list(offsets),
    }


def _echoed(completion: Completion) -> tuple[int, ...]:
    """The tokens of the prompt, where the text begins with it."""
    return completion.prompt_token_ids if completion.reply.echo else ()


def _chat_logprobs(logprobs: Sequence[Logprobs]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""
    content = [
        {**_chat_logprob(chosen), "top_logprobs": [_chat_logprob(one) for one in top]}
        for chosen, top in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    """A token; `bytes` is null where it is part of a character, or there is no tokenizer."""
    whole = token.text is not None and "\N{REPLACEMENT CHARACTER}" not in token.text
    data = list(_name(token).encode()) if whole else None
    return {"token": _name(token), "logprob": _rounded(token), "bytes": data}


def _by_name(tokens: Sequence[TokenLogprob]) -> dict[str, float]:
    """Log-probabilities by the tokens' text; of tokens with one text the first counts."""
    by_name: dict[str, float] = {}
    for one in tokens:
        by_name.setdefault(_name(one), _rounded(one))
    return by_name


def _name(token: TokenLogprob) -> str:
    return f"token_id:{token.token_id}" if token.text is None else token.text


def _rounded(token: TokenLogprob) -> float:
    return round(token.logprob, 6)


def _key(custom_id: str) -> str:
    data = custom_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()
