"""The prompt passes that a decode step carries: the seconds of each op by its ratios.

An op's ratios are the shares of its bytes in every tier. The planner compares ratios and placements
by these seconds. prefill.py has the passes of a finished plan. Knows no budgets.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dakrun.config import DTYPE_BYTES, ModelConfig, Workload
from dakrun.geometry import TILED_MAX_ROWS
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.launches import EXPERT_CHUNK_ROWS, grouped_shape
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.ops import Op
from dakrun.plan.plan import PrefillPlan
from dakrun.plan.roofline import (
    COMPUTE,
    Line,
    Links,
    bound_time,
    compute_time,
    kernel_compute_time,
    line_time,
)
from dakrun.units import ceil_div

PREFILL_LAUNCH_ROWS = TILED_MAX_ROWS  # tokens that one launch of the tiled GEMM multiplies
MATRICES = ("linear", "experts")  # categories of ops
WORK = "work"  # of the SMs. A pass waits for it, or for copies, named by link and direction


def matrix_lines(
    one: Op, links: Links, compute: float, *, staged: bool, reads: int = 1
) -> tuple[dict[str, Line], dict[str, Line]]:
    """Lower bounds of a layer of `one` in seconds: of the SMs' work, and of copies by link.

    The layer's arithmetic takes `compute` seconds. Its matrices are read in place `reads` times, or
    are `staged`: then all experts are copied, also those that no token chose.
    """
    read = one.resident_bytes if staged else reads * one.read_bytes
    lines = links.lines(read, compute, staged=staged)
    copied = lines.keys() - {COMPUTE, LOCAL} if staged else set()
    work = {name: line for name, line in lines.items() if name not in copied}
    return work, {name: lines[name] for name in copied}


def launch_reads(one: Op, profile: HardwareProfile) -> int:
    """Times that a pass reads remote bytes of `one` in place: once for each launch.

    CTAs that compute a dense matrix share what they read. An expert is read once for each tile of
    the rows that chose it.
    """
    launches = ceil_div(one.batch_size, PREFILL_LAUNCH_ROWS)
    if one.category != "experts" or profile.device != "cuda":
        return launches if one.category in MATRICES else 1
    shape = grouped_shape(profile.card, one.atom_bytes)
    most = shape.rows if shape else EXPERT_CHUNK_ROWS
    return launches * math.ceil(one.rows_per_weight / launches / most)


def attention_part(
    op: Op, model: ModelConfig, profile: HardwareProfile, links: Links, tier: str, span: range
) -> tuple[Op, float, float]:
    """Causal attention of a prompt's tokens at the positions `span`, in one layer.

    Returns the op of the launch, the seconds of its work at full rates, and the seconds of the copy
    that writes new keys and values to the slot's `tier`. Earlier keys and values are read in place.
    """
    position, start, length = model.kv_layout.position_bytes, span.start, len(span)
    pairs = length * start + length * (length + 1) / 2
    one = replace(op, batch_size=length, units=1, flops=4.0 * model.q_size * pairs)
    compute = compute_time(one, profile, model.dtype)
    read = position * start / links.direct[tier]
    work = max(compute, read, position * length / links.direct[LOCAL])
    return one, work, 0.0 if tier == LOCAL else position * length / links.staged[tier]


def rows_seconds(model: ModelConfig, links: Links, rows: int) -> float:
    """Seconds in which a pass reads and writes its `rows` rows in HBM, but for its products.

    The bytes are those of two norms, attention's inputs and outputs, and new keys and values.
    """
    width = 4 * model.hidden_size + 4 * model.q_size + 6 * model.kv_size
    return DTYPE_BYTES[model.dtype] * rows * width * model.num_layers / links.direct[LOCAL]


@dataclass(frozen=True)
class PassTimes:
    """Seconds of an op in the prompt passes that a decode step carries, by its ratio in every tier.

    The SMs need the longest of `work`. Copies overlap them, by link and direction.
    """

    work: tuple[Line, ...]
    copies: Mapping[str, Line]

    def by(self, limit: str) -> tuple[Line, ...]:
        """The lines of `limit`, what a pass waits for: WORK, or the copies of that name."""
        return self.work if limit == WORK else (self.copies.get(limit, (0.0, {})),)

    def add(self, ratios: Sequence[float], seconds: dict[str, float]) -> None:
        """Add the op's `seconds` of work and of copies at its `ratios`."""
        if len(self.work) == 1 and not self.work[0][1] and not self.copies:  # mostly
            seconds[WORK] += self.work[0][0]
            return
        seconds[WORK] += bound_time(self.work, ratios)
        for name, line in self.copies.items():
            seconds[name] = seconds.get(name, 0.0) + line_time(line, ratios)


def passes_of(workload: Workload, chunk_tokens: int) -> int:
    """Passes of up to `chunk_tokens` tokens for a batch's prompts without shared prefixes."""
    tokens = workload.batch_size * (workload.prompt_len - workload.shared_len)
    return ceil_div(tokens, chunk_tokens)


class PromptPasses:
    """The prompt passes that a decode step carries: seconds of each op in them, by its ratios.

    A step carries `batches` batches of prompts: 1 / new_tokens, or 0. A batch takes as few
    passes of `prefill` as possible, all with as many tokens. Prefixes that are computed already are
    left out. `times`, by op, are bounds, with arithmetic at the kernels' efficiency. Reading and
    writing rows in HBM takes `rest_s` of work besides. Launches are left out, since no ratio
    changes them; so are copies over a link that always take less time than the least work.
    """

    def __init__(self, costs: StepCosts, prefill: PrefillPlan, *, batches: float) -> None:
        model, profile, work, links = costs.model, costs.profile, costs.workload, costs.links
        passes = passes_of(work, prefill.chunk_tokens)
        prompt = work.prompt_len - work.shared_len
        rows, ends = (ceil_div(work.batch_size * n, passes) for n in (prompt, 1))
        self.rest_s = batches * passes * rows_seconds(model, links, rows)
        self.times: dict[str, PassTimes] = {}
        for op in costs.ops:
            if op.category == "attention":
                length = min(prompt, prefill.chunk_tokens)
                starts = range(work.shared_len, work.prompt_len, length)
                spans = [range(at, min(at + length, work.prompt_len)) for at in starts]
                self.times[op.name] = _attention_times(costs, op, spans, batches)
                continue
            one = op.with_rows(ends if op.name == "lm_head" else rows)
            staged = prefill.stages(one)
            compute = kernel_compute_time(one, compute_time(one, profile, model.dtype), profile)
            reads = 1 if staged else launch_reads(one, profile)
            lines, copies = matrix_lines(one, links, compute, staged=staged, reads=reads)
            each = batches * passes * op.layers
            self.times[op.name] = PassTimes(
                _needed([_scaled(line, each) for line in lines.values()]),
                {name: _scaled(line, each) for name, line in copies.items()},
            )
        self._leave_out_short_copies()

    def _leave_out_short_copies(self) -> None:
        """Leave out copies over a link that always take less time than the least work."""
        longest: dict[str, float] = {}
        for times in self.times.values():
            for name, (_, by_tier) in times.copies.items():
                longest[name] = longest.get(name, 0.0) + max(by_tier.values())
        least = self.rest_s + sum(_least(times.work) for times in self.times.values())
        for op, times in self.times.items():
            long = {name: line for name, line in times.copies.items() if longest[name] > least}
            self.times[op] = replace(times, copies=long)

    @functools.cached_property
    def limits(self) -> tuple[str, ...]:
        """What passes may wait for: WORK, and copies."""
        return (WORK, *sorted({name for times in self.times.values() for name in times.copies}))

    def seconds(self, ratios: Iterable[tuple[str, Sequence[float]]]) -> dict[str, float]:
        """Seconds of work, and of copies by link, of ops at their `ratios` in every tier."""
        seconds = {WORK: self.rest_s}
        for name, of in ratios:
            self.times[name].add(of, seconds)
        return seconds


def _attention_times(costs: StepCosts, op: Op, spans: Sequence[range], batches: float) -> PassTimes:
    """Attention of the prompts of `batches`, each in parts at `spans`; a slot lies in one tier."""
    each = batches * op.layers * costs.workload.batch_size
    work, copies = dict[int, float](), dict[str, Line]()
    for number, tier in enumerate(costs.links.direct):
        parts = [
            attention_part(op, costs.model, costs.profile, costs.links, tier, span)
            for span in spans
        ]
        work[number] = each * sum(seconds for _, seconds, _ in parts)
        if number:
            copies[f"to {tier}"] = 0.0, {number: each * sum(out for _, _, out in parts)}
    if len(set(work.values())) == 1:
        return PassTimes(((work[0], {}),), copies)
    return PassTimes(((0.0, work),), copies)


def _scaled(line: Line, by: float) -> Line:
    constant, by_tier = line
    return by * constant, {tier: by * seconds for tier, seconds in by_tier.items()}


def _needed(lines: Sequence[Line]) -> tuple[Line, ...]:
    """`lines` without those that never exceed the highest of the constant ones, at any ratio."""
    floor = max((constant for constant, by_tier in lines if not by_tier), default=0.0)
    above = [line for line in lines if line[1] and line[0] + max(line[1].values()) > floor]
    return ((floor, {}), *above)


def _least(lines: Sequence[Line]) -> float:
    """The highest constant of `lines`, or the least seconds of a single one."""
    return max(constant + (min(by.values()) if len(lines) == 1 and by else 0.0)
               for constant, by in lines)  # fmt: skip
