"""CUDA graphs: which edges are programmatic, and captures on a GPU."""

import gc
import weakref

import pytest
import torch

from dakrun.engine.step_graphs import MAX_PDL_LEAD
from dakrun.kernels.runtime import capture
from dakrun.kernels.runtime.graph import Edge, programmatic_lead


def chain(kinds: str) -> list[Edge]:
    """Nodes one behind the other: "p" is a programmatic edge, "f" a full one."""
    return [Edge(n, n + 1, kind == "p") for n, kind in enumerate(kinds)]


def test_edges_ahead_of_the_first_full_one_are_counted() -> None:
    assert programmatic_lead([]) == 0
    assert programmatic_lead(chain("fppp")) == 0
    assert programmatic_lead(chain("pfppp")) == 1
    assert programmatic_lead(chain("ppfpf")) == 2
    branch = [Edge(9, 2, False), Edge(9, 8, True)]
    assert programmatic_lead([*chain("pfpp"), *branch]) == 1
    # list_items, embed, first product, attention without a full edge: the step must not be captured
    assert programmatic_lead(chain("pppp")) > MAX_PDL_LEAD


class Engine:
    """Holds a graph, and itself, so that only a garbage collection frees them."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph, self.itself = graph, self


@pytest.mark.gpu
@pytest.mark.parametrize("quickly", [False, True])
def test_no_garbage_is_collected_during_a_capture(quickly: bool) -> None:
    """To destroy a graph is a call of the driver, which would end the capture."""
    x, pool = torch.zeros(1, device="cuda"), torch.cuda.graph_pool_handle()
    held = [Engine(capture(lambda: x.add_(1), pool))]
    ended = weakref.ref(held[0])

    def launches() -> None:
        x.add_(2)
        held.clear()
        assert len([[] for _ in range(100_000)]) and ended(), "collected"
        x.add_(3)

    graph = capture(launches, pool, quickly=quickly)
    assert gc.isenabled()
    gc.collect()
    assert not ended()
    x.zero_()
    graph.replay()
    assert x.item() == 5
