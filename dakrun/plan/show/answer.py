"""The answer of `dakrun plan` in three lines: where the model lies, how fast, what it waits for.

A line ahead of them says if the kernels, whose speed is predicted, do not run on the card.
"""

from dakrun.hardware import LOCAL
from dakrun.plan.advice import resource_text
from dakrun.plan.run_time import RunForecast
from dakrun.plan.show.json import predicted_figures
from dakrun.plan.show.overview import Overview
from dakrun.units import format_seconds

IF_KERNELS_RAN = "all figures below are those of the kernels, if they ran there"


def answer_rows(shown: Overview, run: RunForecast | None = None) -> list[tuple[str, str]]:
    """(title, text) of the lines; `run` is that of a file's rows, whose speed then counts."""
    plan = shown.chosen.plan
    why = plan.why_no_kernels
    return [
        *([] if why is None else [("no kernels", f"{why}; {IF_KERNELS_RAN}")]),
        ("fits", ", ".join(_tier_text(shown, tier) for tier in range(len(plan.tiers)))),
        ("speed", _speed_text(shown, run)),
        ("waits for", waits_for(shown)),
    ]


def waits_for(shown: Overview) -> str:
    """The resources that limit a decode step, each with its share of the step's time."""
    busy = shown.advice.busy
    return " and ".join(
        f"{'memory: ' * (name == LOCAL)}{resource_text(name)} ({busy[name]:.0%} of the step)"
        for name in shown.advice.limits
    )


def _tier_text(shown: Overview, tier: int) -> str:
    plan = shown.chosen.plan
    used = sum(plan.memory(tier).values()) / 2**30
    return f"{plan.tiers[tier]} {used:,.2f} of {plan.budgets[tier] / 2**30:,.2f} GiB"


def _speed_text(shown: Overview, run: RunForecast | None) -> str:
    plan, speed = shown.chosen.plan, predicted_figures(shown.chosen)
    batch = plan.workload.batch_size
    step = (
        f"decode step {format_seconds(speed['decode_step_s'])} "
        f"for {batch:,} request{'s' * (batch > 1)}"
    )
    if run is None:
        return (
            f"{speed['tokens_per_s']:,.1f} tokens/s in decode steps, "
            f"{speed['tokens_per_s_with_prompts']:,.1f} with prompts; {step}"
        )
    return (
        f"{run.tokens_per_s:,.1f} tokens/s in the whole run of {run.seconds:,.1f} s "
        f"for {run.requests:,} request{'s' * (run.requests != 1)}; {step}"
    )
