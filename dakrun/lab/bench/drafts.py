"""Steps with drafts, and the time of a token by acceptance: `dakrun bench --model --speculate N`.

Acceptance is the chance that a draft is right if all drafts before it are. Steps with drafts are
measured after the steps without, with the same weights. Knows neither tables nor ceilings.
"""

import statistics
from collections.abc import Callable

from dakrun.config import Speculation
from dakrun.engine import EngineStats
from dakrun.llm import LLM
from dakrun.plan import ACCEPTANCES, draft_forecasts, drafts_of, tokens_kept

ROUNDS, STEPS = 3, 12  # a round has fewer steps than those after which useless drafts pause
FIGURES = ("draft_step_s", *(f"token_at_{rate:.0%}_s".replace("%", "") for rate in ACCEPTANCES))


def draft_figures(
    llm: LLM, drafts: int, rows: int, new_tokens: int, batch: Callable[[], None]
) -> dict[str, float]:
    """FIGURES of steps of `rows` rows with `drafts` drafts each; none if they are too many tokens.

    `batch` completes `rows` requests of `new_tokens` tokens each. Only steps in which no row can
    have ended count.
    """
    chosen = Speculation("suffix", drafts)
    if drafts_of(draft_forecasts(llm.plan, chosen), rows) < drafts:
        return {}
    engine, steps = llm.engine, list[float]()
    for _ in range(ROUNDS):
        engine.speculate(chosen)
        engine.stats = EngineStats()
        batch()
        most = min(STEPS, max(1, (new_tokens - 1) // (1 + drafts)))
        steps += list(engine.stats.step_s)[:most]
    step_s = statistics.median(steps)
    tokens = (step_s / tokens_kept(rate, drafts) for rate in ACCEPTANCES)
    return dict(zip(FIGURES, (step_s, *tokens), strict=True))
