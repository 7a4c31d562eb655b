"""The time to first token that a plan implies: the prompts of a whole batch, pass by pass.

Knows how the engine cuts prompts into chunks; chooses nothing: operands lie where the plan says.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dakrun.config import DTYPE_BYTES
from dakrun.geometry import TILED_MAX_ROWS
from dakrun.hardware import LOCAL
from dakrun.plan.ops import Op
from dakrun.plan.plan import Plan
from dakrun.plan.roofline import COMPUTE, Links, compute_time, line_time, op_cost
from dakrun.plan.segments import passes
from dakrun.units import ceil_div

PREFILL_LAUNCH_ROWS = TILED_MAX_ROWS  # tokens that one launch of the tiled GEMM multiplies


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


def predict_prefill(plan: Plan) -> Prefill:
    """TTFT of a batch: seconds until every one of its slots has its first token.

    All slots begin empty, with a prompt of `workload.prompt_len` tokens each, and are prefilled
    together, in passes as `plan.prefill` says; those in the first ones have their token earlier. A
    pass of R tokens takes

        max(sum over ops and layers of max(FLOPs / P(R), bytes / rate of each tier),
            bytes that go over each link by the copy engine, either way / its rate).

    A linear op does 2 R M K FLOPs and reads its matrix once, or, with direct reads, once for
    PREFILL_LAUNCH_ROWS tokens; the copy engine brings the remote parts of all matrices while others
    are computed. The lm_head runs on the last token of the prompts that end in the pass. Attention
    is a launch for each prompt: its L tokens from position s on do 4 Hq D (L s + L (L + 1) / 2)
    FLOPs, causally, at P(L), and read s positions of keys and values from the slot's tier, where
    the copy engine brings those of its L tokens. Norms, attention and the cache besides read and
    write each token in HBM. `predicted_s` divides each op's time by its efficiency and adds the
    cost of the launch. Sampling is left out.
    """
    flops = bound_s = predicted_s = 0.0
    chunks = 0
    for work, count in _passes(plan).items():
        one = _Pass(plan)
        one.add(work)
        chunks += count
        flops += count * one.flops
        bound_s += count * one.bound_s
        predicted_s += count * one.predicted_s
    tokens = plan.workload.batch_size * plan.workload.prompt_len
    return Prefill(
        tokens=tokens, chunks=chunks, flops=flops, bound_s=bound_s, predicted_s=predicted_s
    )


# What a pass computes: its tokens, prompts that end in it, and how often (tier, start, length).
_Work = tuple[int, int, tuple[tuple[tuple[int, int, int], int], ...]]


def _passes(plan: Plan) -> Counter[_Work]:
    """How many passes are alike."""
    work, found = plan.workload, Counter[_Work]()
    slots = plan.op("attention").placement[0]  # slots are numbered tier after tier
    tier_of = list(itertools.chain.from_iterable([t] * n for t, n in enumerate(slots)))
    prompts = dict.fromkeys(range(work.batch_size), work.prompt_len)
    for segments in passes(prompts, plan.prefill.chunk_tokens):
        rows = sum(s.length for s in segments)
        ends = sum(s.start + s.length == work.prompt_len for s in segments)
        spans = Counter((tier_of[s.slot], s.start, s.length) for s in segments)
        found[rows, ends, tuple(spans.items())] += 1
    return found


class _Pass:
    """The time of a pass, as ops are added to it: what SMs do, and copies beside that."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.flops = plan, 0.0
        self._links = Links.of(plan.profile, plan.tiers[1:])
        self._bound_s = self._predicted_s = self._launches_s = 0.0
        self._copies_s: dict[str, float] = defaultdict(float)  # by link and direction

    @property
    def bound_s(self) -> float:
        """By bytes and FLOPs alone."""
        return max(self._bound_s, *self._copies_s.values(), 0.0)

    @property
    def predicted_s(self) -> float:
        """With efficiencies, and what launches cost."""
        return max(self._predicted_s, *self._copies_s.values(), 0.0) + self._launches_s

    def add(self, work: _Work) -> None:
        """All ops of a pass."""
        rows, ends, spans = work
        self._others(rows)
        for op in self._plan.ops:
            if op.op.category == "attention":
                for (tier, start, length), count in spans:
                    self._attention(op.op, tier, start, length, count * op.op.layers)
                continue
            n = ends if op.op.name == "lm_head" else rows
            if n:
                one = _with_rows(op.op, n)
                for counts, layers in Counter(op.placement).items():
                    self._matrix(one, op.op.shares(counts), layers)

    def _matrix(self, one: Op, shares: Sequence[float], layers: int) -> None:
        staged = self._plan.prefill.transport == "staged" and one.category == "linear"
        times = 1
        if one.category == "linear" and not staged and shares[0] < 1:
            times = ceil_div(one.batch_size, PREFILL_LAUNCH_ROWS)
        compute = compute_time(one, self._plan.profile, self._plan.model.dtype)
        lines = self._links.named_lines(times * one.read_bytes, compute, staged=staged)
        seconds = {name: line_time(line, shares) for name, line in lines.items()}
        if staged:
            for name in seconds.keys() - {COMPUTE, LOCAL}:
                self._copies_s[name] += layers * seconds.pop(name)
        self._launch(one, max(seconds.values()), layers)

    def _attention(self, op: Op, tier: int, start: int, length: int, count: int) -> None:
        """Causal attention of `length` tokens of one slot, `start` of whose positions are kept."""
        model, name = self._plan.model, self._plan.tiers[tier]
        position = 2 * model.kv_size * op.element_bytes
        pairs = length * start + length * (length + 1) / 2
        one = replace(op, batch_size=length, units=1, flops=4.0 * model.q_size * pairs)
        compute = compute_time(one, self._plan.profile, model.dtype)
        read = position * start / self._links.direct[name]
        self._launch(one, max(compute, read, position * length / self._links.direct[LOCAL]), count)
        if tier:
            out = position * length / self._links.staged[name]
            self._copies_s[f"to {name}"] += count * out

    def _others(self, rows: int) -> None:
        """Rows that no product or sum hides: two norms, what attention takes and gives, the cache.

        A norm reads and writes them; keys and values are stored, and what attention gives is kept
        where the next product reads it.
        """
        model, profile = self._plan.model, self._plan.profile
        width = 4 * model.hidden_size + 4 * model.q_size + 6 * model.kv_size
        size = DTYPE_BYTES[model.dtype] * rows * width * model.num_layers
        seconds = size / self._links.direct[LOCAL]
        self._bound_s += seconds
        self._predicted_s += seconds / profile.linear.at(rows)[1]

    def _launch(self, one: Op, bound: float, count: int) -> None:
        seconds, efficiency = op_cost(one, self._plan.profile)
        self.flops += count * one.flops
        self._bound_s += count * bound
        self._predicted_s += count * bound / efficiency
        self._launches_s += count * seconds


def _with_rows(op: Op, rows: int) -> Op:
    """`op` for `rows` tokens instead of one per slot; a gather reads that many rows."""
    scale = rows / op.batch_size
    read = op.read_bytes * scale if op.category == "gather" else op.read_bytes
    return replace(op, batch_size=rows, flops=op.flops * scale, read_bytes=read)
