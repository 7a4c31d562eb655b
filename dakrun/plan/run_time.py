"""A run simulated: the steps of a file's requests, much as the engine schedules them, in seconds.

Goes through all steps with their rows, tokens of prompts and KV blocks, but with no token. Takes
the placement of a plan as given. Simpler than the engine: the KV blocks of all tiers are one pool,
requests are admitted to the ends that they may have at most, and none gives its blocks up. Knows
neither files nor the engine.
"""

import functools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from dakrun.config import DTYPE_BYTES, SamplingParams
from dakrun.geometry import KV_BLOCK, TILED_MAX_ROWS
from dakrun.hardware import LOCAL
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.peak_blocks import peak_blocks
from dakrun.plan.plan import Plan
from dakrun.plan.prefill import pass_seconds, requests_per_admission
from dakrun.plan.roofline import Links
from dakrun.plan.run_bound import run_limits
from dakrun.units import ceil_div

ROWS_STEP, MANY_ROWS, MANY_ROWS_STEP = 32, 512, 64  # about the engine's batch buckets
SUSTAINED = 0.95  # of the profile's rate of arithmetic: in long runs an H200 lowers its clock
PREFIX_LAUNCH_SECONDS = 10e-6  # of a launch that attends to prefixes, where they are short
PREFIX_EFFICIENCY = 0.4  # of its arithmetic
THRESHOLD_PASSES = 20  # over a row's logits, to find the thresholds of top-k and top-p
MAX_REQUESTS = 8192  # of more, every second, third, ... is scheduled
MAX_CHOICES = 1 << 18  # of a file's rows; of more, every second, third, ... is looked at


class RequestLengths(NamedTuple):
    """Tokens of a request: its prompt, new ones at most, and those of the prompt that it shares.

    The KV blocks of the shared ones are computed by earlier requests.
    """

    prompt: int
    new: int
    shared: int = 0


class RowTokens(Protocol):
    """RequestLengths of a row of a file, and the number of its `choices`."""

    @property
    def prompt(self) -> int: ...
    @property
    def new(self) -> int: ...
    @property
    def choices(self) -> int: ...
    @property
    def shared(self) -> int: ...


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
            f"predicted {self.seconds:.1f} s for {self.requests} requests, "
            f"{self.tokens_per_s:,.0f} new tokens/s; it waits for {self.waits_for}"
        )

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second; 0 for an empty run."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Request:
    """A request that has begun: tokens of its prompt left to compute, and steps to its end."""

    lengths: RequestLengths
    left: int
    steps: int
    cached: int  # positions of its own, shared ones left out


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
    free and the KV blocks suffice for all that run, to their ends.
    """
    order = sorted(requests, key=lambda r: (-r.new, -r.prompt))
    stride = max(1, ceil_div(len(order), MAX_REQUESTS))
    costs, waiting = _Costs(plan, thresholds), deque(order[::stride])
    running: list[_Request] = []
    beginning: deque[_Request] = deque()
    seconds = mixed_s = 0.0
    kv_bytes = 0.0
    steps = 0
    blocked = False
    together = requests_per_admission(plan)
    while waiting or beginning or running:
        while waiting and not blocked and len(running) + len(beginning) < costs.slots:
            r = waiting[0]
            new = _Request(r, r.prompt - r.shared, r.new - 1, r.prompt - r.shared)
            if (running or beginning) and not costs.fit([*running, *beginning, new]):
                blocked = True
                break
            beginning.append(waiting.popleft() and new)
        there = len(running) + len(beginning)
        tokens = sum(r.left for r in beginning)
        enough = not waiting or len(beginning) * costs.slots >= together * there
        begun = bool(beginning) and beginning[0].left < _computed(beginning[0])
        parts: list[tuple[_Request, int, int]] = []
        if beginning and (not running or enough or begun or tokens >= costs.chunk):
            parts = list(_parts(beginning, costs.room(len(running))))
        positions = sum(r.cached for r in running)
        shared = sum(r.lengths.shared for r in running)
        kv_bytes += positions * plan.model.kv_bytes_per_token
        if parts:
            spans = Counter((start, length) for _, start, length in parts)
            ends = sum(r.left == 0 for r, _, _ in parts)
            took = costs.mixed(len(running), positions, shared, ends, tuple(sorted(spans.items())))
            mixed_s += took
        else:
            took = costs.decode(len(running), positions, shared)
        seconds += took
        steps += 1
        for one in running:
            one.cached += 1
            one.steps -= 1
        while beginning and beginning[0].left == 0:
            running.append(beginning.popleft())
        if any(r.steps <= 0 for r in running):
            running = [r for r in running if r.steps > 0]
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


def foretell_file(
    plan: Plan,
    lengths: tuple[Sequence[RowTokens], float] | None,
    defaults: SamplingParams,
) -> RunForecast | None:
    """The run of rows of these `lengths`, and their share of the file; None of a pipe.

    Choices of a row share its prompt. `defaults` say whether tokens are drawn with top-k or top-p;
    what rows say of it is not known yet.
    """
    if lengths is None:
        return None
    rows, share = lengths
    thresholds = defaults.temperature > 0 and (defaults.top_k > 0 or defaults.top_p < 1)
    count = sum(row.choices for row in rows)
    every = (
        ceil_div(count, MAX_CHOICES) | 1
    )  # odd, so that all of a row's 2, 4 or 8 have their turn
    if count:
        share *= ceil_div(count, every) / count
    return foretell(plan, _choices(rows, every), share=share, thresholds=thresholds)


def _choices(rows: Iterable[RowTokens], every: int) -> Iterator[RequestLengths]:
    """Every so many-th of all choices of the rows, from the first on."""
    before = 0
    for row in rows:
        again = (row.prompt - 1) // KV_BLOCK * KV_BLOCK  # shared by all choices but the first
        for choice in range(-before % every, row.choices, every):
            yield RequestLengths(row.prompt, row.new, again if choice else row.shared)
        before += row.choices


def _computed(r: _Request) -> int:
    """Tokens of the prompt that the request computes."""
    return r.lengths.prompt - r.lengths.shared


def _parts(beginning: Iterable[_Request], room: int) -> Iterator[tuple[_Request, int, int]]:
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
        self._blocks = sum(blocks for _, _, blocks in plan.kv_placement())
        attention = plan.op("attention").op
        full = attention.layers * attention.read_bytes
        self._attention_s = sum(plan.op("attention").predicted_s) / full  # per KV byte
        self._kv_bytes = plan.model.kv_bytes_per_token

    def fit(self, requests: Iterable[_Request]) -> bool:
        """Whether the KV blocks suffice for `requests`, to their ends."""
        lengths = [(r.cached, r.steps) for r in requests]
        at_ends = sum(ceil_div(cached + steps, KV_BLOCK) for cached, steps in lengths)
        return at_ends <= self._blocks or peak_blocks(*zip(*lengths, strict=True)) <= self._blocks

    def room(self, rows: int) -> int:
        """Tokens of prompts in a step with `rows` rows."""
        return max(self.chunk // 2, self.chunk - rows)

    def decode(self, rows: int, positions: int, shared: int) -> float:
        """A step of `rows` rows with `positions` cached positions in all, and `shared` ones."""
        step = min(rows, MANY_ROWS_STEP if rows > MANY_ROWS else ROWS_STEP)
        bucket = min(self.slots, ceil_div(rows, step) * step)
        others = self._attention(positions) + self._prefixes(shared) + rows * self._row_s
        return self._products(bucket) + others

    def mixed(
        self,
        rows: int,
        positions: int,
        shared: int,
        ends: int,
        spans: tuple[tuple[tuple[int, int], int], ...],
    ) -> float:
        """A step of such rows and parts of prompts, given as ((start, length), count)."""
        others = self._attention(positions) + self._prefixes(shared) + (rows + ends) * self._row_s
        return pass_seconds(self._plan, rows, ends, spans, others) / SUSTAINED

    def _attention(self, positions: int) -> float:
        return positions * self._kv_bytes * self._attention_s

    def _prefixes(self, shared: int) -> float:
        """Attention to prefixes that rows share: arithmetic, since they are read once."""
        if not shared:
            return 0.0
        layers, profile = self._plan.model.num_layers, self._plan.profile
        flops = 4.0 * self._plan.model.q_size * layers * shared
        rate = profile.compute[self._plan.model.dtype].at(TILED_MAX_ROWS)
        return layers * PREFIX_LAUNCH_SECONDS + flops / (PREFIX_EFFICIENCY * rate)

    @functools.cache  # noqa: B019  of one forecast
    def _products(self, rows: int) -> float:
        """All ops of a step of `rows` rows but attention."""
        plan = self._plan
        workload = replace(plan.workload, batch_size=rows)
        costs = StepCosts(plan.model, workload, plan.profile, plan.tiers[1:])
        ops = {op.name: op for op in costs.ops}
        return (
            plan.sampling_s
            + plan.waits_s
            + sum(
                sum(costs.placed(ops[op.op.name], op.placement, op.transport).predicted_s)
                for op in plan.ops
                if op.op.category != "attention"
            )
        )
