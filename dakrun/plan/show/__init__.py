"""Plans for people and scripts.

overview.py computes all that is shown, json.py writes it for scripts, table.py for people, below
the three lines of answer.py; plot.py draws a plan with the parts in picture.py. rich and matplotlib
are imported when they are needed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dakrun.plan.show.answer import answer_rows
    from dakrun.plan.show.json import (
        bound_figures,
        kv_figures,
        overview_dict,
        plan_dict,
        predicted_figures,
    )
    from dakrun.plan.show.overview import Comparison, Forecast, Overview
    from dakrun.plan.show.plot import Point, clusters, plot_plan, points, ratio_curve
    from dakrun.plan.show.table import CHOICES, NEEDS, choice_rows, need_rows, render, summary_rows

__all__ = [
    "CHOICES",
    "NEEDS",
    "Comparison",
    "Forecast",
    "Overview",
    "Point",
    "answer_rows",
    "bound_figures",
    "choice_rows",
    "clusters",
    "kv_figures",
    "need_rows",
    "overview_dict",
    "plan_dict",
    "plot_plan",
    "points",
    "predicted_figures",
    "ratio_curve",
    "render",
    "summary_rows",
]

_NAMES = {
    "answer": ("answer_rows",),
    "json": ("bound_figures", "kv_figures", "overview_dict", "plan_dict", "predicted_figures"),
    "overview": ("Comparison", "Forecast", "Overview"),
    "plot": ("Point", "clusters", "plot_plan", "points", "ratio_curve"),
    "table": ("CHOICES", "NEEDS", "choice_rows", "need_rows", "render", "summary_rows"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
