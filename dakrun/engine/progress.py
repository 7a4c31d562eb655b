"""The scheduler's records: each request's progress, and totals of all runs.

engine.py and the parts of the scheduler that it uses change them.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dakrun.engine.step import Accepted, Likeliest, Sampling, Step
from dakrun.engine.swap import Saved
from dakrun.geometry import KV_BLOCK
from dakrun.requests import Completion, Request, StopStrings
from dakrun.units import ceil_div

NO_SLOT = -1


@dataclass
class EngineStats:
    """Totals of all runs so far; times are in seconds, by request or by decode step.

    A row of several choices is as many requests, which count when they end, also where another
    choice fails and makes the row an error.

    `capped` counts the requests that ended at max_model_len, short of their max_tokens,
    `structured` those whose answers must have a form, `valid` those of them that have it.
    `preempted` counts how often a request gave up its KV blocks, `swapped` how often such a request
    went on from copies of its blocks; otherwise its positions were computed again. `shared_tokens`
    counts the tokens of prompts whose keys and values lay in KV blocks of others. `new_tokens`
    counts the tokens of requests that have ended, `running_tokens` those of the other requests.

    `prefill_steps` counts the steps with prompts, which took `prefill_s`. `mixed_steps` counts the
    steps with prompts and decode rows; those rows read `mixed_kv_bytes`. `step_s` has the seconds
    of each step without prompts. These steps had `step_rows` rows in all, which read
    `kv_bytes_read` KV bytes. A block that rows share counts once in a step.

    `drafts` counts the rows of steps with drafts by the number of drafts of a row;
    `accepted_drafts` counts the accepted drafts by the same number. `draft_lost_s` are the seconds
    by which rejected drafts made steps longer.
    """

    requests: int = 0
    capped: int = 0
    structured: int = 0
    valid: int = 0
    preempted: int = 0
    swapped: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    new_tokens: int = 0
    running_tokens: int = 0
    prefill_s: float = 0.0
    prefill_steps: int = 0
    mixed_steps: int = 0
    mixed_kv_bytes: int = 0
    ttft_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    tpot_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    step_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    step_rows: int = 0
    kv_bytes_read: int = 0
    drafts: Counter[int] = field(default_factory=Counter)
    accepted_drafts: Counter[int] = field(default_factory=Counter)
    draft_lost_s: float = 0.0

    @property
    def tokens_so_far(self) -> int:
        """New tokens, those of running requests included."""
        return self.new_tokens + self.running_tokens

    def count_rows(self, step: Step, kv_bytes: int) -> None:
        """Add the decode rows of a step, which read so many KV bytes."""
        if step.prompts:
            self.mixed_kv_bytes += kv_bytes
        else:
            self.step_rows += len(step.decode)
            self.kv_bytes_read += kv_bytes

    def count_time(self, step: Step, seconds: float) -> None:
        """Add a step that took so many seconds."""
        if step.prompts:
            self.prefill_s += seconds
            self.prefill_steps += 1
            self.mixed_steps += bool(step.decode)
        else:
            self.step_s.append(seconds)

    def count_drafts(self, accepted: Accepted) -> None:
        """Add the drafts of a step's rows."""
        pairs = zip(accepted.drafted, accepted.tokens, strict=False)
        rows = [(count, len(tokens)) for count, tokens in pairs if tokens]
        self.drafts.update(count for count, _ in rows)
        for count, length in rows:
            if count:
                self.accepted_drafts[count] += length - 1

    def count_end(self, r: "RequestState", result: Completion) -> None:
        """Add `r`, which has ended with that result."""
        self.requests += 1
        self.structured += result.valid is not None
        self.valid += bool(result.valid)
        asked = r.request.params.max_tokens
        at_limit = result.finish_reason == "length"
        self.capped += at_limit and asked is not None and len(r.tokens) < asked
        self.prompt_tokens += result.prompt_tokens
        self.shared_tokens += min(r.shared, result.prompt_tokens)
        self.new_tokens += len(r.tokens)
        self.ttft_s.append(result.ttft_s)
        if len(r.tokens) > 1:
            self.tpot_s.append(result.tpot_s)


@dataclass(eq=False)
class RequestState:
    """A request from its arrival to its end, also while it has no slot (NO_SLOT).

    `prompt` has the tokens that enter the KV cache before the first decode row: the request's
    prompt, and the new tokens that it had when it last gave up its slot. The first `cached`
    positions of its slot are computed, or will be by the steps launched so far: the next row begins
    there, or up to `drafted` positions later if these steps' drafts are accepted. `kept` is the
    mean number of tokens that a step with drafts gives it, 0 while unknown. The first `shared`
    positions lie in blocks of other requests. `names` has the names of the prompt's full KV blocks.
    The first `spilled` blocks lie outside the slot's tier; such a request has no names.
    `saved` are copies of its KV blocks, from which it goes on after it has given them up. `limit`
    is the most new tokens that it may have; with 0 one is computed and dropped. `scores` has the
    log-probabilities of the prompt's tokens behind the first, if it asks for them.
    """

    request: Request
    stop: StopStrings | None
    sampling: Sampling
    limit: int
    prompt: Sequence[int]
    slot: int = NO_SLOT
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Likeliest] = field(default_factory=list)
    scores: list[Likeliest] = field(default_factory=list)
    cached: int = 0
    drafted: int = 0
    kept: float = 0.0
    names: Sequence[bytes] = ()
    shared: int = 0
    spilled: int = 0
    saved: Saved | None = None
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: bool = False
    end: int = field(init=False)  # positions in the KV cache at its end, at most

    def __post_init__(self) -> None:
        # All but the last token.
        self.end = len(self.request.prompt_ids) + max(1, self.limit) - 1

    @property
    def may_end_early(self) -> bool:
        """Whether a token may end the request before its limit."""
        params = self.request.params
        if not self.limit:
            return False
        ends = self.stop is not None or params.structured_outputs is not None
        return not params.ignore_eos or ends or bool(params.stop_token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are wanted, and its prompt is not through."""
        return self.request.params.prompt_logprobs is not None and not self.tokens

    @property
    def blocks_at_end(self) -> int:
        """KV blocks of its slot's tier that it takes at the end, at most, besides shared ones."""
        return ceil_div(self.end - self.shared, KV_BLOCK) - self.spilled
