"""`dakrun evaluate`: the figures of the DAK paper, and two of an article, as a page.

figures/ says which points a figure has, how charts.py draws them, and what their results mean.
predict.py and measure.py find the results of points, store.py keeps results, run.py goes through
the points and writes the page (page.py, with pictures by svg.py). Importing this folder imports no
torch.
"""

from dakrun.lab.evaluate.run import Evaluation, evaluate
from dakrun.lab.evaluate.scope import Scope

__all__ = ["Evaluation", "Scope", "evaluate"]
