"""Results of OpenAI Batch rows: response bodies of completions and chat completions, and errors.

Knows neither files nor requests' fields, which are in openai_rows.py.
"""

import hashlib
import time
from typing import Any

from dakrun.requests.request import Completion, RowError


def completion_row(*choices: Completion) -> dict[str, Any]:
    """The result row of a Batch row whose `choices` have finished; its ids are hashes of custom_id.

    As OpenAI counts, `usage` has each prompt once and all completions.
    """
    first = choices[0]
    key, is_chat = _key(first.id), first.reply.kind == "chat"
    prompt_tokens = sum(choice.prompt_tokens for choice in choices[:: first.reply.n])
    new = sum(len(choice.token_ids) for choice in choices)
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
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = completion.text
    if completion.text is None:
        choice["token_ids"] = completion.token_ids
    return choice | {"finish_reason": completion.finish_reason, "logprobs": None}


def _key(custom_id: str) -> str:
    data = custom_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()
