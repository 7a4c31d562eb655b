"""The figures of the paper, and of articles, by name and in the order of the page."""

from dakrun.lab.evaluate.figures.ablations import Ablations
from dakrun.lab.evaluate.figures.articles import L2Barrier, Parts
from dakrun.lab.evaluate.figures.base import Figure
from dakrun.lab.evaluate.figures.capacity import InHbm, ManyRequests
from dakrun.lab.evaluate.figures.link import LinkReads
from dakrun.lab.evaluate.figures.multicast import LinkBytes, Multicast
from dakrun.lab.evaluate.figures.ops import OpRatios
from dakrun.lab.evaluate.figures.ours import Ours
from dakrun.lab.evaluate.figures.ratios import LargeBatch, SmallBatch, Strategies

KINDS: tuple[type[Figure], ...] = (
    *(SmallBatch, OpRatios, LinkReads, LinkBytes, LargeBatch, InHbm, ManyRequests),
    *(Strategies, Ablations, Multicast, Ours, L2Barrier, Parts),
)
FIGURES: dict[str, type[Figure]] = {kind.name: kind for kind in KINDS}

__all__ = ["FIGURES", "Figure"]
