"""The time to first token that a plan implies: the prompts of a whole batch, chunk by chunk.

Knows how the engine cuts prompts into chunks; chooses nothing: operands lie where the plan says.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dakrun.plan.ops import PREFILL_CHUNK_TOKENS, Op
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.roofline import Links, compute_time, predicted_time, times_of


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """The prefill of one full batch: `tokens` in `chunks` passes, `flops` of arithmetic.

    `bound_s` is bytes over bandwidths and FLOPs over rates alone, `predicted_s` has the profile's
    efficiencies and its fixed cost per launch, too.
    """

    tokens: int
    chunks: int
    flops: float
    bound_s: float
    predicted_s: float


@dataclass(frozen=True)
class Span:
    """`length` tokens of the prompt in slot `slot`, from position `start` on."""

    slot: int
    start: int
    length: int


def predict_prefill(plan: Plan) -> Prefill:
    """TTFT of a batch: seconds until every one of its slots has its first token.

    All slots begin empty, with a prompt of `workload.prompt_len` tokens each, and are prefilled
    together; those in the first chunks have their token earlier. With R tokens in a chunk,

        T = sum over chunks, ops and layers of max(FLOPs / P(R), bytes / rate of each tier),

    the roofline of the decode step (DESIGN.md, the planner) at the plan's placement and transport.
    A linear op does 2 R M K FLOPs and reads its matrix once a chunk; the lm_head runs on the last
    token of the prompts that end in the chunk. Attention is a launch for each prompt in the
    chunk: its L tokens from position s on do 4 Hq D (L s + L (L + 1) / 2) FLOPs, causally, at
    P(L), and read s + L positions of keys and values from the slot's tier. `predicted_s` divides
    each time by the op's efficiency and adds the cost of the launch. Activations, writes to the
    cache and sampling are left out.
    """
    links, work = Links.of(plan.profile, plan.tiers[1:]), plan.workload
    flops = bound_s = predicted_s = 0.0
    for op, one, shares, count in _launches(plan):
        compute = compute_time(one, plan.profile, plan.model.dtype)
        lines = links.named_lines(one.read_bytes, compute, staged=op.transport == "staged")
        kernel, link = times_of(lines, shares)
        flops += count * one.flops
        bound_s += count * max(kernel, link)
        predicted_s += count * predicted_time(one, kernel, plan.profile, link=link)
    tokens = work.batch_size * work.prompt_len
    return Prefill(
        tokens=tokens,
        chunks=-(-tokens // PREFILL_CHUNK_TOKENS),
        flops=flops,
        bound_s=bound_s,
        predicted_s=predicted_s,
    )


def prefill_chunks(batch_size: int, prompt_len: int) -> Iterator[list[Span]]:
    """The passes in which the engine prefills the prompts of a batch, one after the other."""
    chunk: list[Span] = []
    room = PREFILL_CHUNK_TOKENS
    for slot in range(batch_size):
        start = 0
        while start < prompt_len:
            length = min(prompt_len - start, room)
            chunk.append(Span(slot, start, length))
            start, room = start + length, room - length
            if room == 0:
                yield chunk
                chunk, room = [], PREFILL_CHUNK_TOKENS
    if chunk:
        yield chunk


def _launches(plan: Plan) -> Iterator[tuple[OpPlan, Op, tuple[float, ...], int]]:
    """(op, what one launch of it does, its share of every tier, number of such launches)."""
    rows, ends, spans = _work(plan)
    for op in plan.ops:
        if op.op.category == "attention":
            for (tier, start, length), count in spans.items():
                shares = tuple(float(t == tier) for t in range(len(plan.tiers)))
                yield op, _attention(plan, op.op, start, length), shares, count * op.op.layers
            continue
        placed = Counter(op.placement)
        for n, passes in (ends if op.op.name == "lm_head" else rows).items():
            one = _with_rows(op.op, n)
            for counts, layers in placed.items():
                shares = tuple(size / op.op.resident_bytes for size in op.op.tier_bytes(counts))
                yield op, one, shares, passes * layers


def _work(plan: Plan) -> tuple[Counter[int], Counter[int], Counter[tuple[int, int, int]]]:
    """How many chunks have so many tokens; so many ends of prompts; spans (tier, start, length)."""
    work, rows, ends = plan.workload, Counter[int](), Counter[int]()
    spans = Counter[tuple[int, int, int]]()
    slots = plan.op("attention").placement[0]  # slots are numbered tier after tier
    tier_of = list(itertools.chain.from_iterable([t] * n for t, n in enumerate(slots)))
    for chunk in prefill_chunks(work.batch_size, work.prompt_len):
        rows[sum(span.length for span in chunk)] += 1
        ends[sum(span.start + span.length == work.prompt_len for span in chunk)] += 1
        spans.update((tier_of[span.slot], span.start, span.length) for span in chunk)
    del ends[0]
    return rows, ends, spans


def _with_rows(op: Op, rows: int) -> Op:
    """`op` for `rows` tokens instead of one per slot; a gather reads that many rows."""
    scale = rows / op.batch_size
    read = op.read_bytes * scale if op.category == "gather" else op.read_bytes
    return replace(op, batch_size=rows, flops=op.flops * scale, read_bytes=read)


def _attention(plan: Plan, op: Op, start: int, length: int) -> Op:
    """Causal attention of `length` tokens of one slot, `start` of whose positions are cached."""
    model, end = plan.model, start + length
    pairs = length * start + length * (length + 1) / 2
    return replace(
        op,
        batch_size=length,
        units=1,
        flops=4.0 * model.q_size * pairs,
        read_bytes=2 * model.kv_size * op.element_bytes * end,
    )
