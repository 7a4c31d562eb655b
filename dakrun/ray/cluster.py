"""The Ray cluster of a run: connecting to it, and how many workers it has room for."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from dakrun.errors import CannotRun
from dakrun.memory.limits import usable_cores

CONNECT_S = 10.0
OBJECT_STORE_BYTES = 256 << 20  # of a local cluster: rows and results are small


@dataclass(frozen=True)
class Resources:
    """What an actor asks Ray for."""

    cpus: float
    gpus: float

    def options(self) -> dict[str, Any]:
        """Options of a Ray actor."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


@contextmanager
def connected(address: str, *, cpus: int | None = None) -> Iterator[None]:
    """In the block, this process is connected to the cluster at `address`.

    "local" starts one on this machine for the time of the block, where workers may count on at
    least `cpus` cores; "auto" finds the one that runs here. Raises CannotRun.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 else: behind all other programs
        quiet["num_cpus"] = max(usable_cores(), cpus or 1)
        quiet |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _check_answers(address)
        ray.init(address=address, **quiet)
    except Exception as problem:  # OSError, ConnectionError, and others by the kind of address
        where = "on this machine" if address == "auto" else f"at {address}"
        raise CannotRun(
            f"no Ray cluster {where} ({str(problem).split('. ')[0]})",
            hint="start one with `ray start --head`, or use --ray local",
        ) from None
    try:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has one of its own
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise OSError if nothing answers at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def resources(device: str, threads: int | None, workers: int | None) -> tuple[Resources, int]:
    """What each worker asks for, and the number of workers: by default one for each GPU.

    On CPUs it is one for each node, and each has as many threads as there are cores for it. Needs
    a connection. Raises CannotRun if there is no GPU for the device "cuda".
    """
    has = ray.cluster_resources()
    gpus = int(has.get("GPU", 0))
    if device == "cuda" and not gpus:
        raise CannotRun(
            "the Ray cluster has no GPU",
            hint="add nodes with GPUs, or compute with --device cpu",
        )
    if gpus and device != "cpu":
        return Resources(threads or 1, 1), workers or gpus
    workers = workers or sum(node["Alive"] for node in ray.nodes())
    return Resources(threads or max(1, int(has.get("CPU", 1)) // workers), 0), workers
