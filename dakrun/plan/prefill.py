"""Prefill: how prompts are cut into passes, the time to first token, and the choice of passes.

Takes the placement of a plan and the HBM that it leaves as given.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dakrun.geometry import GRAPHED_ROWS, GRAPHED_TOKENS
from dakrun.plan.footprint import activation_bytes
from dakrun.plan.ops import Op
from dakrun.plan.plan import Plan, PrefillPlan
from dakrun.plan.policy import Transport
from dakrun.plan.prompt_pass import (
    MATRICES,
    PREFILL_LAUNCH_ROWS,
    attention_part,
    launch_reads,
    matrix_lines,
    rows_seconds,
)
from dakrun.plan.roofline import (
    Links,
    bound_times,
    compute_time,
    line_time,
    norm_time,
    op_cost,
)
from dakrun.plan.staging import staging_bytes

EXPERT_LAYERS = 2.2  # layers without experts that a CPU launches in the time of one with some
PASS_LAYERS = 32  # of the pass whose launch takes pass_launch_seconds
PREDICTION_ERROR = 0.02  # relative: a TTFT this close to the fastest counts as equal


@dataclass(frozen=True)
class Segment:
    """`length` tokens of one slot that enter its cache from position `start` on."""

    slot: int
    start: int
    length: int


def passes(prompts: Mapping[int, int], chunk_tokens: int) -> Iterator[list[Segment]]:
    """The segments of each pass, `chunk_tokens` in all; the last pass may have fewer.

    `prompts` are lengths in tokens by slot.
    """
    chunk: list[Segment] = []
    room = chunk_tokens
    for slot, prompt in prompts.items():
        start = 0
        while start < prompt:
            length = min(prompt - start, room)
            chunk.append(Segment(slot, start, length))
            start, room = start + length, room - length
            if room == 0:
                yield chunk
                chunk, room = [], chunk_tokens
    if chunk:
        yield chunk


def with_prefill(plan: Plan) -> Plan:
    """`plan` with the prefill of the least predicted TTFT for which HBM has room.

    Among options within PREDICTION_ERROR of the fastest, choose the smallest in memory. Passes
    of the GPU's kernels have PREFILL_LAUNCH_ROWS tokens, or more with remote matrices, which cross
    the link once per pass. Remote matrices are staged if there is room: direct reads occupy SMs
    longer than the link needs, twice as long on an H200 with 30% of OPT-6.7B in host memory.
    Without room for any such pass, the plan keeps its passes of PREFILL_CHUNK_TOKENS.
    """
    if plan.profile.device != "cuda" or plan.model.dtype == "float32":
        return plan
    fitting = [option for option in _options(plan) if _room(option) >= 0] or [plan]
    options = [option for option in fitting if option.prefill.transport == "staged"] or fitting
    times = [predict_prefill(option).predicted_s for option in options]
    near = [
        option
        for option, time in zip(options, times, strict=True)
        if time <= (1 + PREDICTION_ERROR) * min(times)
    ]
    return max(near, key=_room)


def _options(plan: Plan) -> Iterator[Plan]:
    """`plan` with each pass size and each transport that may help."""
    work = plan.workload
    transports: list[Transport] = [plan.policy.transport or "direct"]
    tokens = highest = PREFILL_LAUNCH_ROWS
    if any(op.op.category in MATRICES and op.ratio > 0 for op in plan.ops):
        highest = max(highest, work.batch_size * work.prompt_len)
        if plan.policy.transport is None:
            transports.append("staged")
    while tokens < 2 * highest:
        for transport in transports:
            yield _with(plan, PrefillPlan(chunk_tokens=tokens, transport=transport))
        tokens *= 2


def _with(plan: Plan, prefill: PrefillPlan) -> Plan:
    """`plan` with `prefill`, and its activations and staging buffers in the memory map."""
    held = activation_bytes(plan.model, plan.workload, prefill.chunk_tokens)
    fixed = plan.fixed_bytes | {"activations": held}
    needed = staging_bytes(plan.ops, prefill, plan.profile, plan.tiers[1:], plan.model.dtype)
    if staging := max(plan.fixed_bytes.get("staging", 0), needed):
        fixed["staging"] = staging
    return replace(plan, prefill=prefill, fixed_bytes=fixed)


def _room(plan: Plan) -> int:
    """Bytes of the local tier that are free."""
    return plan.budgets[0] - sum(plan.memory(0).values())


@dataclass(frozen=True, kw_only=True)
class PrefillForecast:
    """The prefill of one full batch: `tokens` in `chunks` passes, with `flops` of arithmetic.

    `bound_s` is bytes over bandwidths and FLOPs over rates alone; `predicted_s` includes the
    profile's efficiencies and fixed costs.
    """

    tokens: int
    chunks: int
    flops: float
    bound_s: float
    predicted_s: float


def predict_prefill(plan: Plan) -> PrefillForecast:
    """TTFT of a batch: seconds until all of its slots have their first token, from empty ones.

    All slots begin empty, with a prompt of `workload.prompt_len` tokens each, and are prefilled
    together, in the passes of `plan.prefill`. Slots of early passes have their token sooner. A pass
    of R tokens takes

        max(sum over ops and layers of max(FLOPs / P(R), bytes / rate of each tier),
            bytes over each link by the copy engine, in either direction, / its rate).

    - A linear op does 2 R M K FLOPs. It reads its matrix once or, with direct reads, once for
      PREFILL_LAUNCH_ROWS tokens. Staged parts are copied while other ops run. The same holds for
      the experts that are read; they are staged, all of them, where nearly all are. Direct reads
      of an expert are one for each tile of its rows.
    - The lm_head runs on the last token of the prompts that end in the pass.
    - Attention is a launch for each prompt. L tokens from position s on do
      4 Hq D (L s + L (L + 1) / 2) FLOPs, causally, at P(L). They read s positions of keys and
      values from the slot's tier. The copy engine writes those of the L tokens there.
    - Norms, attention and the cache also read and write each token in HBM.

    `predicted_s` divides each op's time by its efficiency and adds the cost of its launch.
    Sampling is left out.
    """
    flops = bound_s = predicted_s = 0.0
    chunks = 0
    for work, count in _works(plan).items():
        one = _Pass(plan)
        one.add(work)
        chunks += count
        flops += count * one.flops
        bound_s += count * one.bound_s
        predicted_s += count * one.predicted_s
    tokens = plan.workload.batch_size * plan.workload.prompt_len
    return PrefillForecast(
        tokens=tokens, chunks=chunks, flops=flops, bound_s=bound_s, predicted_s=predicted_s
    )


def pass_seconds(
    plan: Plan,
    rows: int,
    ends: int,
    spans: Sequence[tuple[tuple[int, int], int]],
    attention_s: float,
    *,
    replays: bool = True,
) -> float:
    """Predicted seconds of a step of `rows` decode rows and parts of prompts, `ends` of which end.

    `spans` counts the parts by (start, length); `attention_s` is the attention of the rows. A small
    step `replays` a CUDA graph, but for the first two of its kind.
    """
    tokens = sum(length * count for (_, length), count in spans)
    one = _Pass(plan)
    one.add((rows + tokens, rows + ends, tuple(((0, *span), count) for span, count in spans)))
    seconds = one.predicted_s + attention_s
    if plan.profile.device != "cuda":
        return seconds
    replays = replays and is_graphed(plan, rows, rows + tokens)
    launch_s = 0.0 if replays else launch_seconds(plan) - hidden_launch_seconds(plan)
    return max(seconds + plan.profile.kernel_model.mixed_step_seconds, launch_s)


def launch_seconds(plan: Plan) -> float:
    """Seconds in which the CPU launches a step with prompts that is no graph."""
    model = plan.model
    layers = float(model.num_layers)
    if model.mixture:
        layers += (EXPERT_LAYERS - 1) * (layers - len(model.mixture.dense_layers))
    return plan.profile.kernel_model.pass_launch_seconds * layers / PASS_LAYERS


def hidden_launch_seconds(plan: Plan) -> float:
    """Seconds of such a launch in which the GPU still computes the step before."""
    return plan.predicted_s / 2


def is_graphed(plan: Plan, rows: int, tokens: int) -> bool:
    """Whether steps with prompts replay CUDA graphs; of `tokens` tokens, `rows` are decode rows.

    Steps with texts of 2,048 positions and more, or log-probabilities of prompts, never do.
    """
    remote = any(units for _, units in plan.placement("attention")[1:])
    stages = any(
        plan.prefill.stages(op.op.with_rows(max(1, tokens)), op.shares[0]) for op in plan.weights()
    )
    few = rows <= GRAPHED_ROWS and tokens <= GRAPHED_TOKENS
    return few and not remote and not stages


# Work of a pass: tokens, prompts that end in it, and counts of (tier, start, length) segments.
_Work = tuple[int, int, tuple[tuple[tuple[int, int, int], int], ...]]


def _works(plan: Plan) -> Counter[_Work]:
    """The number of passes with each work."""
    work, works = plan.workload, Counter[_Work]()
    slots = [n for _, n, _ in plan.kv_placement()]  # they are numbered tier after tier
    tier_of = list(itertools.chain.from_iterable([t] * n for t, n in enumerate(slots)))
    prompts = dict.fromkeys(range(work.batch_size), work.prompt_len)
    for segments in passes(prompts, plan.prefill.chunk_tokens):
        rows = sum(s.length for s in segments)
        ends = sum(s.start + s.length == work.prompt_len for s in segments)
        spans = Counter((tier_of[s.slot], s.start, s.length) for s in segments)
        works[rows, ends, tuple(spans.items())] += 1
    return works


class _Pass:
    """Time of a pass, summed as ops are added: the SMs' work, and the copies that overlap it."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.flops = plan, 0.0
        self._links = Links.of(plan.profile, plan.tiers[1:])
        self._bound_s = self._predicted_s = self._launches_s = 0.0
        self._copies_s: dict[str, float] = defaultdict(float)  # by link and direction

    @property
    def bound_s(self) -> float:
        """Seconds by bytes and FLOPs alone."""
        return max(self._bound_s, *self._copies_s.values(), 0.0)

    @property
    def predicted_s(self) -> float:
        """Seconds with efficiencies and fixed costs of launches."""
        return max(self._predicted_s, *self._copies_s.values(), 0.0) + self._launches_s

    def add(self, work: _Work) -> None:
        """Add all ops of a pass."""
        rows, ends, spans = work
        self._add_rows(rows)
        for op in self._plan.ops:
            if op.op.category == "attention":
                for (tier, start, length), count in spans:
                    self._add_attention(op.op, tier, start, length, count * op.op.layers)
                continue
            n = ends if op.op.name == "lm_head" else rows
            if n:
                one = op.op.with_rows(n)
                staged = self._plan.prefill.stages(one, op.shares[0])
                for counts, layers in Counter(op.placement).items():
                    ratios = one.shares(counts) if staged else one.read_shares(counts)
                    self._add_matrix(one, ratios, layers, staged=staged)

    def _add_matrix(self, one: Op, ratios: Sequence[float], layers: int, *, staged: bool) -> None:
        """A matrix in `layers` layers, with the ratio in every tier of what a pass reads.

        Of staged experts that is all of them.
        """
        profile = self._plan.profile
        reads = 1 if staged or ratios[0] == 1 else launch_reads(one, profile)
        compute = compute_time(one, profile, self._plan.model.dtype)
        work, copies = matrix_lines(one, self._links, compute, staged=staged, reads=reads)
        for name, line in copies.items():
            self._copies_s[name] += layers * line_time(line, ratios)
        kernel, link = bound_times(work, ratios)
        if one.category != "experts":  # the SMs of a link's part compute, too
            kernel, link = max(kernel, link), 0.0
        self._launch(one, kernel, layers, link=link)

    def _add_attention(self, op: Op, tier: int, start: int, length: int, count: int) -> None:
        """Causal attention of `length` tokens of a slot with `start` cached positions."""
        plan, name, span = self._plan, self._plan.tiers[tier], range(start, start + length)
        one, work, out = attention_part(op, plan.model, plan.profile, self._links, name, span)
        self._launch(one, work, count)
        if tier:
            self._copies_s[f"to {name}"] += count * out

    def _add_rows(self, rows: int) -> None:
        """Rows in HBM besides those of products."""
        seconds = rows_seconds(self._plan.model, self._links, rows)
        self._bound_s += seconds
        self._predicted_s += seconds / self._plan.profile.linear.at(rows)[1]

    def _launch(self, one: Op, kernel: float, count: int, *, link: float = 0.0) -> None:
        """`count` launches of an op with a bound of `kernel` or `link` seconds.

        Its efficiency is that of the former. A router is ahead of experts.
        """
        profile = self._plan.profile
        seconds, efficiency = op_cost(one, profile)
        if one.category == "experts":
            seconds += norm_time(one, profile)
        self.flops += count * one.flops
        self._bound_s += count * max(kernel, link)
        self._predicted_s += count * max(kernel / efficiency, link)
        self._launches_s += count * seconds
