"""CUDA graphs: capture, timing of a replay, and the kinds of a graph's edges.

Knows nothing of the kernels launched.
"""

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def capture(
    launches: Callable[[], object], pool: Any, *, quickly: bool = False
) -> torch.cuda.CUDAGraph:
    """Capture what `launches` launches as a graph, with its memory from `pool`.

    `quickly`: neither wait for the GPU nor return unused memory to it before.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with _no_garbage_collection():
        if quickly:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    launches()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            with torch.cuda.graph(graph, pool=pool):
                launches()
    graph.instantiate()
    return graph


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage: to free the graphs of an earlier engine, say, calls the driver, which may
    end a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def replay_seconds(launches: Callable[[], object], replays: int = 5) -> float:
    """Seconds of a replay of what `launches` launches as a graph: the median of `replays`."""
    graph = capture(launches, torch.cuda.graph_pool_handle())
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def capture_id() -> int:
    """Id of the capture that torch's current stream is part of; 0 outside a capture.

    All streams of one capture have the same id.
    """
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import runtime

    stream = runtime.cudaStream_t(torch.cuda.current_stream().cuda_stream)
    status, _, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    _check(status)
    return int(number)


def edge_kinds(graph: torch.cuda.CUDAGraph) -> tuple[int, int]:
    """Numbers of (programmatic, full) edges between the nodes of `graph`.

    The second kernel of a programmatic edge (PDL) may start before the first has ended.
    """
    edges = graph_edges(graph)
    pdl = sum(edge.programmatic for edge in edges)
    return pdl, len(edges) - pdl


@dataclass(frozen=True)
class Edge:
    """An edge of a graph, between nodes that are numbered by their handles."""

    start: int
    end: int
    programmatic: bool


def graph_edges(graph: torch.cuda.CUDAGraph) -> list[Edge]:
    """The edges between the nodes of `graph`."""
    from cuda.bindings import runtime

    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    status, *_, count = runtime.cudaGraphGetEdges(handle, 0)
    _check(status)
    status, starts, ends, edges, count = runtime.cudaGraphGetEdges(handle, count)
    _check(status)
    programmatic = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
    return [
        Edge(int(start), int(end), edge.type == programmatic)
        for start, end, edge in list(zip(starts, ends, edges, strict=False))[:count]
    ]


def programmatic_lead(edges: Sequence[Edge]) -> int:
    """Most programmatic edges on a way from a node without predecessors, before a full edge.

    The kernels behind the full edge start after all those ahead of it have ended.
    """
    behind = {edge.end for edge in edges}
    reached = [(edge.start, 0) for edge in edges if edge.start not in behind]
    following: dict[int, list[int]] = {}
    for edge in edges:
        if edge.programmatic:
            following.setdefault(edge.start, []).append(edge.end)
    most = 0
    while reached:
        node, lead = reached.pop()
        most = max(most, lead)
        reached += [(end, lead + 1) for end in following.get(node, ())]
    return most


def _check(status: Any) -> None:
    if status.value:
        raise RuntimeError(f"CUDA cannot describe the graph or its capture: {status.name}")
