"""The figures of the paper, by name and in the order of the page."""

from dakrun.evaluate.figures.base import Figure
from dakrun.evaluate.figures.link import LinkReads
from dakrun.evaluate.figures.ops import OpRatios
from dakrun.evaluate.figures.ratios import LargeBatch, SmallBatch
from dakrun.evaluate.figures.strategies import Strategies

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (OpRatios(), LinkReads(), SmallBatch(), LargeBatch(), Strategies())
}

__all__ = ["FIGURES", "Figure"]
