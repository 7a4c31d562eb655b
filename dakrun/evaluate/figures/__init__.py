"""The figures of the paper, by name and in the order of the page."""

from dakrun.evaluate.figures.base import Figure
from dakrun.evaluate.figures.ratios import LargeBatch, SmallBatch, Strategies

FIGURES: dict[str, Figure] = {
    figure.name: figure for figure in (SmallBatch(), LargeBatch(), Strategies())
}

__all__ = ["FIGURES", "Figure"]
