"""A model loaded for the node that this process runs on: its profile, and its share of the memory.

Knows Ray's view of the node; planning and loading are LLM's.
"""

import fcntl
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import ray

from dakrun.lab.probe.run import kept_or_measured, measured_device
from dakrun.llm import LLM
from dakrun.memory.limits import available_host_memory
from dakrun.models.hub import find_model
from dakrun.plan import Policy, RunOptions, cost_kinds
from dakrun.resources import cache_dir


def load_on_node(model: str, run: RunOptions, *, memory_sharers: int = 1) -> LLM:
    """The model, planned for this node and loaded.

    The profile "auto" is the one that this node keeps of its GPU; costs that it lacks for the model
    are measured, the whole GPU the first time. Up to `memory_sharers` actors like this one share
    the node's free host memory, as many as there is room for: each plans with its part. Raises
    UsageError or CannotRun.
    """
    profile = run.profile
    if profile == "auto":
        config, _ = find_model(model, run.dtype, run.load_format, run.format)
        with _one_at_a_time():
            profile = kept_or_measured(
                measured_device(run.device), cost_kinds(config), lambda _: None
            )
    sharing = min(memory_sharers, _room_for())
    policy = _part_of(run.policy, sharing, measured_device(run.device))
    return LLM(model, run=replace(run, profile=profile, policy=policy))


def node_name() -> str:
    """This node's name, for people."""
    return socket.gethostname()


def _room_for() -> int:
    """How many actors with the resources of this one the node has room for."""
    context = ray.get_runtime_context()
    mine = context.get_assigned_resources()
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    has = nodes.get(context.get_node_id(), {})
    fits = [int(has.get(name, 0) / mine[name]) for name in ("GPU", "CPU") if mine.get(name)]
    return max(1, min(fits, default=1))


def _part_of(policy: Policy, sharing: int, device: str) -> Policy:
    """The policy of one of `sharing` actors on this node, if it leaves budgets open."""
    if sharing == 1 or policy.host_budget is not None:
        return policy
    part = available_host_memory() // sharing
    if device == "cpu" and policy.hbm_budget is None:  # both tiers are the same memory
        return replace(policy, hbm_budget=part // 2, host_budget=part // 2)
    return replace(policy, host_budget=part)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one process of this node at a time measure it; the others then find what it kept."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".measuring").open("w")
    except OSError:  # no cache: each measures for itself
        yield
        return
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
