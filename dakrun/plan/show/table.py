"""A plan for people: what `dakrun plan` prints on a rich console, and its summary.

op_tables.py has the tables. Nothing depends on colour.
"""

import textwrap

from rich.console import Console

from dakrun.errors import CannotRun
from dakrun.plan.lossy import lossy_text
from dakrun.plan.ops import cost_kinds, kept_positions
from dakrun.plan.plan import Plan
from dakrun.plan.planner import MIN_OFFLOAD_GAIN
from dakrun.plan.run_time import RunForecast
from dakrun.plan.show.answer import answer_rows
from dakrun.plan.show.json import (
    bound_figures,
    experts_figures,
    kv_figures,
    op_format,
    predicted_figures,
    strategy_reason,
)
from dakrun.plan.show.op_tables import (
    CHOICES,
    NEEDS,
    choice_legend,
    choice_rows,
    need_legend,
    need_rows,
)
from dakrun.plan.show.overview import Comparison, Forecast, Overview
from dakrun.plan.step_time import ACCEPTANCES, draft_forecasts
from dakrun.tables import print_table
from dakrun.units import format_bytes, format_rate, format_seconds

TITLE_WIDTH = 15
LEAST_NOTED = 0.0005  # of a ratio or a gain: less is written as zero
PHASES = {
    1: "remote reads only where they make an op faster (up to its a)",
    2: "also where they make an op no slower (up to its b)",
    3: "more than is free: every further remote byte costs link time",
}


def render(
    shown: Overview,
    console: Console,
    *,
    wide: bool = False,
    run: RunForecast | None = None,
    rows: str = "",
) -> None:
    """Print the answer, the tables of needs and of choices, and the summary.

    `wide` has all columns; `run` is that of a file's rows, of which `rows` says how many can run.
    """
    plan = shown.chosen.plan
    for title, text in [*answer_rows(shown, run), *([("rows", rows)] if rows else [])]:
        line = _wrapped(text, console.width, title)
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print()
    for title, columns, cells, legend in (
        ("What each op needs", NEEDS, need_rows(plan), need_legend()),
        ("What the plan does with it", CHOICES, choice_rows(plan), choice_legend(plan)),
    ):
        console.print(title, highlight=False)
        print_table(console, columns, cells, wide=wide)
        lines = _wrapped(legend, console.width)
        console.print(lines, end="\n\n", soft_wrap=True, highlight=False)
    for title, text in summary_rows(shown):
        line = _wrapped(text, console.width, title)
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def summary_rows(shown: Overview) -> list[tuple[str, str]]:
    """(title, text) pairs: problem, memory, ratios, speed, comparisons and advice."""
    plan = shown.chosen.plan
    model, work, profile = plan.model, plan.workload, plan.profile
    source = profile.provenance
    kv = kv_figures(plan)
    return [
        ("model", f"{model.name}, {model.dtype}, {format_bytes(plan.weight_bytes)} of weights"),
        *_format_rows(plan),
        *_experts_rows(plan),
        (
            "workload",
            f"batch {work.batch_size}, {work.prompt_len} prompt + {work.new_tokens} new tokens, "
            f"{kept_positions(work)} positions kept per slot",
        ),
        (
            "profile",
            f"{profile.name}: {profile.description} ({source.kind}, {source.date})"
            f"{_estimated_text(plan)}{_l2_text(plan)}",
        ),
        *((f"{name} memory", _memory_text(plan, tier)) for tier, name in enumerate(plan.tiers)),
        (
            "offload ratio",
            f"{plan.ratio:.1%} of weights and KV chosen, "
            f"{plan.required_ratio:.1%} required by capacity",
        ),
        ("strategy", f"{plan.strategy}: {strategy_reason(plan)}"),
        *_forgone_rows(plan),
        ("phase", f"{plan.phase} of 3: {PHASES[plan.phase]}"),
        (
            "KV per step",
            f"{format_bytes(kv['resident_bytes'])} resident, "
            f"{format_bytes(kv['hbm_read_bytes_per_step'])} read from {plan.tiers[0]}, "
            f"{format_bytes(kv['link_read_bytes_per_step'])} over the link",
        ),
        ("prefill", _prefill_text(shown.chosen)),
        ("prompts", _prompts_text(shown)),
        ("bound", _speed_text(bound_figures(shown.chosen))),
        ("predicted", _speed_text(predicted_figures(shown.chosen))),
        *_draft_rows(plan),
        *_uniform_rows(shown.uniform),
        *(("published", _published_text(other)) for other in shown.published),
        ("advice", shown.advice.sentence),
    ]


def _estimated_text(plan: Plan) -> str:
    """Which products' costs are estimates, as the profile has none."""
    kinds = cost_kinds(plan.model) - {"router"}  # named with the experts
    missing = sorted(kind for kind in kinds if not plan.profile.measures(kind))
    if not missing:
        return ""
    return f"; costs of products with {' and '.join(missing)} are estimates"


def _format_rows(plan: Plan) -> list[tuple[str, str]]:
    """The formats of a quantized model, and what of it is not applied; or what one would take."""
    quantization = plan.model.quantization
    if not quantization:
        lossy = lossy_text(plan)
        return [("quantized", lossy)] if lossy else []
    formats: dict[str, list[str]] = {}
    for op in plan.weights():
        formats.setdefault(op_format(plan, op), []).append(op.op.name)
    text = "; ".join(f"{', '.join(names)}: {name}" for name, names in formats.items())
    return [
        ("format", f"{quantization.name}; kept as {text}"),
        *(("not applied", f"{what}: products read the weights alone")
          for what in [" and ".join(quantization.unapplied)] if what),
    ]  # fmt: skip


def _experts_rows(plan: Plan) -> list[tuple[str, str]]:
    """The experts that a step is expected to read, if the model has any."""
    found = experts_figures(plan)
    if found is None:
        return []
    rows = plan.workload.batch_size
    text = (
        f"{found['experts']} in a layer, {found['experts_per_token']} for a token; a step of "
        f"{rows} row{'s' * (rows > 1)} is expected to read {found['experts_read_per_step']:.1f}, "
        f"{format_bytes(found['read_bytes_per_step'])} of {format_bytes(found['resident_bytes'])}"
    )
    if (local := found["local_read_share"]) < 1:
        text += f", {local:.0%} of it in {plan.tiers[0]}"
    if plan.model.mixture and plan.model.mixture.popularity:
        text += f"; placed by use ({found['popularity']})"
    return [("experts", text)]


def _prefill_text(forecast: Forecast) -> str:
    """Size of passes, and how they read remote weights."""
    plan, found = forecast.plan, forecast.prefill
    text = f"{found.tokens:,} tokens in passes of up to {plan.prefill.chunk_tokens:,}"
    remote = any(op.ratio > 0 for op in plan.weights())
    return text + (f", remote weights {plan.prefill.transport}" if remote else "")


def _draft_rows(plan: Plan) -> list[tuple[str, str]]:
    """The largest step with drafts, the time of a token, and where drafts save time."""
    steps = draft_forecasts(plan, plan.workload.speculation)
    if not steps:
        return []
    few, most = steps[0], steps[-1]
    times = ", ".join(
        f"{format_seconds(most.token_s(rate))} at an acceptance of {rate}" for rate in ACCEPTANCES
    )
    text = (
        f"{most.rows} row{'s' * (most.rows > 1)} of {1 + most.drafts} tokens take "
        f"{format_seconds(most.step_s)}, without drafts {format_seconds(most.plain_s)}; a token "
        f"takes {times}; drafts save time if a step "
        f"keeps more than {most.break_even:.2f} tokens of a row"
    )
    one = f", with one row more than {few.break_even:.2f}" if few != most else ""
    return [("drafts", text + one)]


def _l2_text(plan: Plan) -> str:
    """Whether steps are predicted to read from L2."""
    l2, rate = plan.profile.l2, plan.profile.hbm_bytes_per_s
    return (
        f"; a step's operands stay in L2, at {rate / 1e9:,.0f} GB/s" if l2 and l2[1] == rate else ""
    )


def _prompts_text(shown: Overview) -> str:
    """The prompt passes of a decode step, and the ratios that they change."""
    prompts, plan = shown.prompts, shown.chosen.plan
    passes = "pass" if prompts.passes == 1 else "passes"
    text = f"a decode step carries {prompts.passes:.3g} prompt {passes}"
    if not prompts.changed:
        return f"{text}, which change no ratio"
    return f"{text}; without them: " + ", ".join(
        f"{name} {ratio:.1%} (with: {plan.op(name).ratio:.1%})"
        for name, ratio in prompts.changed.items()
    )


def _memory_text(plan: Plan, tier: int) -> str:
    memory = plan.memory(tier)
    parts = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in memory.items() if size)
    used = f"{format_bytes(sum(memory.values()))} of {format_bytes(plan.budgets[tier])}"
    return f"{used} ({parts})" if parts else used


def _speed_text(speed: dict[str, float]) -> str:
    return (
        f"TTFT {format_seconds(speed['ttft_s'])}, "
        f"decode step {format_seconds(speed['decode_step_s'])}, "
        f"{speed['tokens_per_s']:,.1f} tokens/s, EB {format_rate(speed['eb_bytes_per_s'])}, "
        f"EB total {format_rate(speed['eb_total_bytes_per_s'])}"
    )


def _forgone_rows(plan: Plan) -> list[tuple[str, str]]:
    """A note on an offloading plan whose gain is too small, if there is one."""
    gain = 0.0 if plan.forgone is None else 1 - plan.forgone.predicted_s / plan.predicted_s
    if plan.forgone is None or plan.forgone.ratio < LEAST_NOTED or gain < LEAST_NOTED:
        return []
    return [
        (
            "note",
            f"with {plan.forgone.ratio:.1%} outside {plan.tiers[0]} a step is predicted to be "
            f"{gain:.1%} faster; for a gain below {MIN_OFFLOAD_GAIN:.0%} all bytes stay in "
            f"{plan.tiers[0]}, unless you set --offload-ratio {plan.forgone.ratio:.4f}",
        )
    ]


def _uniform_rows(uniform: Forecast | CannotRun) -> list[tuple[str, str]]:
    if isinstance(uniform, CannotRun):
        return [("uniform", f"the same ratio for every op cannot run: {uniform}")]
    return [
        ("uniform ratio", f"{uniform.plan.ratio:.1%}, the same for every op as far as units allow"),
        ("uniform bound", _speed_text(bound_figures(uniform))),
        ("uniform pred.", _speed_text(predicted_figures(uniform))),
    ]


def _published_text(other: Comparison) -> str:
    """A published EB, the prediction for the same plan, and both over the bound."""
    figure = other.published
    return (
        f"EB {format_rate(figure.eb_bytes_per_s)} with {figure.offload_ratio:.0%} outside "
        f"{other.plan.tiers[0]}: {other.efficiency:.0%} of the bound of "
        f"{format_rate(other.bound_eb)}; predicted {format_rate(other.expected_eb)} "
        f"({other.expected:.0%}); source: {figure.source}"
    )


def _wrapped(text: str, width: int, title: str = "") -> str:
    """`text` beside its title, wrapped to `width` columns."""
    indent = TITLE_WIDTH if title else 0
    return textwrap.fill(
        text,
        width,
        initial_indent=f"{title:<{indent}}",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
