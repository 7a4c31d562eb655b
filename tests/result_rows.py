"""A completion and an error, and what is written of them."""

from dakrun.requests import Completion, RowError


def completion(id: str = "a", text: str | None = "so", ids: tuple[int, ...] = (5, 6)) -> Completion:
    return Completion(
        id=id,
        text=text,
        token_ids=ids,
        finish_reason="stop",
        prompt_tokens=3,
        ttft_s=0.1,
        tpot_s=0.01,
    )


ERROR = RowError(id="line-4", line=4, code="invalid_json", message="not JSON")
COMPLETION_LINE = (
    '{"id":"a","text":"so","token_ids":[5,6],"finish_reason":"stop",'
    '"usage":{"prompt_tokens":3,"completion_tokens":2}}\n'
)
ERROR_LINE = '{"id":"line-4","error":{"code":"invalid_json","message":"not JSON","line":4}}\n'
