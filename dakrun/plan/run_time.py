"""A run simulated: the steps of a file's requests, much as the engine schedules them, in seconds.

Goes through all steps with their rows, tokens of prompts and KV blocks, but with no token. Takes
the placement of a plan as given. Simpler than the engine: the KV blocks of all tiers are one pool,
requests are admitted to the ends that they may have at most, and none gives its blocks up. Knows
neither files nor the engine.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dakrun.config import DTYPE_BYTES
from dakrun.geometry import TILED_MAX_ROWS, padded_tokens
from dakrun.hardware import LOCAL
from dakrun.plan.plan import Plan
from dakrun.plan.prefill import pass_seconds
from dakrun.plan.prompt_groups import PromptGroups
from dakrun.plan.roofline import Links
from dakrun.plan.run_bound import run_limits
from dakrun.plan.running_requests import (
    BegunRequest,
    RequestLengths,
    RunningRequests,
    first_that_fits,
)
from dakrun.plan.step_time import StepTimes
from dakrun.units import ceil_div, counted

ROWS_STEP, MANY_ROWS, MANY_ROWS_STEP = 32, 512, 64  # about the engine's batch buckets
SUSTAINED = 0.95  # of the profile's rate of arithmetic: in long runs an H200 lowers its clock
PREFIX_LAUNCH_SECONDS = 10e-6  # of a launch that attends to prefixes, where they are short
PREFIX_EFFICIENCY = 0.4  # of its arithmetic
THRESHOLD_PASSES = 20  # over a row's logits, to find the thresholds of top-k and top-p
MAX_REQUESTS = 8192  # of more, every second, third, ... is scheduled


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """A run: `seconds` from its first step to its last, of which `mixed_s` with parts of prompts.

    `waits_for` is what takes longest at full rates: arithmetic, hbm or the name of a remote tier.
    """

    seconds: float
    mixed_s: float
    requests: int
    prompt_tokens: int
    shared_tokens: int
    new_tokens: int
    waits_for: str

    def __str__(self) -> str:
        return (
            f"predicted {self.seconds:.1f} s for {counted(self.requests, 'request')}, "
            f"{self.tokens_per_s:,.0f} new tokens/s; it waits for {self.waits_for}"
        )

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second; 0 for an empty run."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


def foretell(
    plan: Plan,
    requests: Iterable[RequestLengths],
    *,
    share: float = 1.0,
    thresholds: bool = False,
) -> RunForecast:
    """The run of `requests`, each of which takes as many new tokens as it may.

    They are a `share` of all, above 0 to 1; the others are taken to be like them. `thresholds`:
    tokens are drawn with top-k or top-p.

    Those that take most steps begin first. A step has a row of every running request, and up to
    `plan.prefill.chunk_tokens` rows and tokens of prompts together. A request begins if a slot is
    free and the KV blocks suffice for all that run, to their ends. Where they do not, the longest
    one begins for which they do.
    """
    order = sorted(requests, key=lambda r: (-r.new, -r.prompt))
    costs = _Costs(plan, thresholds)
    stride = max(1, ceil_div(len(order), MAX_REQUESTS))
    waiting = order[(stride - 1) // 2 :: stride]
    running = RunningRequests(max((r.new for r in order), default=1) - 1, costs.blocks)
    beginning: deque[BegunRequest] = deque()
    seconds = mixed_s = 0.0
    kv_bytes = 0.0
    steps = 0
    blocked = False
    together = PromptGroups.of(plan).best()
    while waiting or beginning or running.rows:
        while waiting and not blocked and running.rows + len(beginning) < costs.slots:
            found: int | None = 0
            if running.rows or beginning:
                found = _next_one(waiting, running)
            if blocked := found is None:
                break
            assert found is not None
            beginning.append(running.begin(waiting.pop(found)))
        there = running.rows + len(beginning)
        tokens = sum(r.left for r in beginning)
        enough = not waiting or len(beginning) * costs.slots >= together * there
        begun = bool(beginning) and beginning[0].left < beginning[0].own
        parts: list[tuple[BegunRequest, int, int]] = []
        if beginning and (not running.rows or enough or begun or tokens >= costs.chunk):
            parts = list(_parts(beginning, costs.room(running.rows)))
        at_once = 1 if parts else running.steps_left  # until then no step differs but in positions
        positions = running.positions * at_once + running.rows * at_once * (at_once - 1) // 2
        kv_bytes += positions * plan.model.kv_bytes_per_token
        if parts:
            spans = Counter((start, length) for _, start, length in parts)
            ends = sum(r.left == 0 for r, _, _ in parts)
            took = costs.mixed(running, ends, tuple(sorted(spans.items())))
            mixed_s += took
        else:
            took = costs.decode(running, at_once, positions)
        seconds += took
        steps += at_once
        computed = []
        while beginning and beginning[0].left == 0:
            computed.append(beginning.popleft())
        if running.advance(computed, at_once):
            blocked = False
    totals = [sum(lengths) for lengths in zip(*order, strict=True)] or [0, 0, 0]
    limits = run_limits(
        plan, requests=len(order), prompt_tokens=totals[0] - totals[2], new_tokens=totals[1],
        steps=steps * stride, kv_bytes=kv_bytes * stride,
    )  # fmt: skip
    return RunForecast(
        seconds=seconds * stride / share,
        mixed_s=mixed_s * stride / share,
        requests=round(len(order) / share),
        prompt_tokens=round(totals[0] / share),
        shared_tokens=round(totals[2] / share),
        new_tokens=round(totals[1] / share),
        waits_for=max(limits, key=limits.__getitem__),
    )


def _next_one(waiting: Sequence[RequestLengths], running: RunningRequests) -> int | None:
    """The number of the longest request that has room beside those that run."""
    if running.has_room(waiting[0]):
        return 0
    return first_that_fits(len(waiting), lambda i: running.has_room(waiting[i]))


def _parts(beginning: Iterable[BegunRequest], room: int) -> Iterator[tuple[BegunRequest, int, int]]:
    """Requests, first positions and tokens of the parts of prompts in a step; they are taken."""
    for r in beginning:
        length = min(r.left, room)
        if not length:
            return
        start = r.lengths.prompt - r.left
        r.left -= length
        room -= length
        yield r, start, length


class _Costs:
    """Seconds of steps under a plan, and what fits its slots and blocks."""

    def __init__(self, plan: Plan, thresholds: bool) -> None:
        self._plan = plan
        logits = THRESHOLD_PASSES * plan.model.vocab_size * DTYPE_BYTES[plan.model.dtype]
        self._row_s = thresholds * logits / Links.of(plan.profile, ()).direct[LOCAL]
        self.slots, self.chunk = plan.workload.batch_size, plan.prefill.chunk_tokens
        self.blocks = sum(blocks for _, _, blocks in plan.kv_placement())
        attention = plan.op("attention").op
        full = attention.layers * attention.read_bytes
        self._attention_s = sum(plan.op("attention").predicted_s) / full  # per KV byte
        self._kv_bytes = plan.model.kv_bytes_per_token
        self._times, self._other_s = StepTimes(plan), plan.sampling_s + plan.waits_s
        self._kinds = Counter[tuple[int, int]]()  # steps with prompts by size and about their rows

    def room(self, rows: int) -> int:
        """Tokens of prompts in a step with `rows` rows."""
        return max(self.chunk // 2, self.chunk - self._bucket(rows))

    def decode(self, running: RunningRequests, steps: int, positions: int) -> float:
        """Steps of the `running` requests, which attend to so many positions in all of them."""
        rows = running.rows
        each = self._other_s + self._times.products(self._bucket(rows))
        each += self._prefixes(running.shared) + rows * self._row_s
        return steps * each + self._attention(positions)

    def _bucket(self, rows: int) -> int:
        """Rows that a step of `rows` computes, idle ones included."""
        step = MANY_ROWS_STEP if rows > MANY_ROWS else min(rows, ROWS_STEP)
        return min(self.slots, ceil_div(rows, step) * step) if rows else 0

    def mixed(
        self, running: RunningRequests, ends: int, spans: tuple[tuple[tuple[int, int], int], ...]
    ) -> float:
        """A step with parts of prompts, given as ((start, length), count); `ends` of them end."""
        tokens = running.rows + ends
        others = self._attention(running.positions) + self._prefixes(running.shared)
        others += tokens * self._row_s
        size = padded_tokens(running.rows + sum(length * count for (_, length), count in spans))
        kind = (size, running.rows.bit_length())
        self._kinds[kind] += 1
        replays = self._kinds[kind] > 2  # the first loads kernels, the second is captured
        seconds = pass_seconds(self._plan, running.rows, ends, spans, others, replays=replays)
        return seconds / SUSTAINED

    def _attention(self, positions: int) -> float:
        """Attention to `positions` of requests."""
        return positions * self._kv_bytes * self._attention_s

    def _prefixes(self, shared: int) -> float:
        """Attention to prefixes that rows share: arithmetic, since they are read once."""
        if not shared:
            return 0.0
        layers, profile = self._plan.model.num_layers, self._plan.profile
        flops = 4.0 * self._plan.model.q_size * layers * shared
        rate = profile.compute[self._plan.model.dtype].at(TILED_MAX_ROWS)
        return layers * PREFIX_LAUNCH_SECONDS + flops / (PREFIX_EFFICIENCY * rate)
