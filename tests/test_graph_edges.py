"""Which edges of a captured step are programmatic; the graphs themselves need a GPU."""

from dakrun.engine.step_graphs import MAX_PDL_LEAD
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
    # embed, first product, attention without a full edge: the step must not be captured
    assert programmatic_lead(chain("pppp")) > MAX_PDL_LEAD
