"""The figures of the paper, by name and in the order of the page."""

from dakrun.evaluate.figures.ablations import Ablations
from dakrun.evaluate.figures.base import Figure
from dakrun.evaluate.figures.capacity import Capacity
from dakrun.evaluate.figures.link import LinkReads
from dakrun.evaluate.figures.multicast import LinkBytes, Multicast
from dakrun.evaluate.figures.ops import OpRatios
from dakrun.evaluate.figures.ours import Ours
from dakrun.evaluate.figures.ratios import LargeBatch, SmallBatch
from dakrun.evaluate.figures.strategies import Strategies

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        SmallBatch(),
        OpRatios(),
        LinkReads(),
        LinkBytes(),
        LargeBatch(),
        Capacity(),
        Strategies(),
        Ablations(),
        Multicast(),
        Ours(),
    )
}

__all__ = ["FIGURES", "Figure"]
