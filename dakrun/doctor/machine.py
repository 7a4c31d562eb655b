"""Checks and facts of this machine: GPUs, driver, memory, NUMA nodes and links.

Reads /proc, /sys, the driver and torch.cuda. Knows nothing of packages and plans.
"""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dakrun.hardware import MIN_SHARED_BYTES, RUN_ON, Card, gpu_names, how_kernels_run
from dakrun.memory.limits import (
    available_host_memory,
    cgroup_limit,
    lock_limit,
    numa_node,
    numa_nodes,
    pci_address,
)
from dakrun.units import format_bytes

ROOT = Path("/")
MIN_DRIVER = 580  # oldest driver for CUDA 13
TMA_CAPABILITY = (9, 0)
NVLINK_GENERATIONS = {20: 1, 25.781: 2, 25: 3, 26.562: 4, 50: 5, 53.125: 5}  # by GB/s each way
PCIE_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


@dataclass(frozen=True)
class Check:
    """A check's result. A lack has a remedy; a note is information only."""

    name: str
    status: Literal["ok", "lack", "note"]
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status == "lack" and not self.remedy:
            raise ValueError(f"{self.name} needs a remedy")


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use; `address` is its PCI address as /sys writes it."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    address: str
    shared_bytes: int = MIN_SHARED_BYTES  # of a block at most


def visible_gpus() -> list[Gpu]:
    """The GPUs that torch can use; an empty list without torch."""
    try:
        from torch import cuda

        count = cuda.device_count() if cuda.is_available() else 0
        properties: list[Any] = [cuda.get_device_properties(index) for index in range(count)]
    except Exception:
        return []
    return [
        Gpu(
            index,
            p.name,
            (p.major, p.minor),
            p.total_memory,
            pci_address(p),
            p.shared_memory_per_block_optin,
        )
        for index, p in enumerate(properties)
    ]


def gpu(gpus: Sequence[Gpu]) -> list[Check]:
    """Each GPU, or the reason why torch has none."""
    if gpus:
        return [
            Check(f"gpu {g.index}", "ok", f"{g.name}, compute capability {_dotted(g.capability)}, "
                  f"{format_bytes(g.memory_bytes)}" + _free_memory(g))
            for g in gpus
        ]  # fmt: skip
    names = gpu_names()
    if not names:
        return [Check("gpu", "note", "no NVIDIA GPU is visible; see generate below")]
    import torch

    built = torch.version.cuda
    remedy = (
        "check CUDA_VISIBLE_DEVICES, the container's GPU access and the driver below"
        if built
        else "install a torch built with CUDA; pytorch.org says how"
    )
    return [Check("gpu", "lack", f"{', '.join(names)}: torch cannot use it", remedy)]


def driver(gpus: Sequence[Gpu], root: Path = ROOT) -> Check:
    """The NVIDIA driver's version, and the CUDA version that it supports."""
    text = _read(root / "proc/driver/nvidia/version")
    version = re.search(r"NVRM version:.*?\b(\d{3,})((?:\.\d+)+)", text)
    cuda = _driver_cuda()
    supports = f"up to CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    if not version and not cuda:
        return Check("driver", "note", "no NVIDIA driver; only a GPU needs it")
    found = ", ".join(filter(None, [version and version[1] + version[2], supports]))
    if (cuda and cuda < 13000) or (version and int(version[1]) < MIN_DRIVER):
        return Check("driver", "lack", found, f"install driver {MIN_DRIVER} or later, for CUDA 13")
    return Check("driver", "ok", found)


def direct_transport(gpus: Sequence[Gpu]) -> Check:
    """Whether kernels can read remote memory with the tensor memory accelerator."""
    needs = f"compute capability {_dotted(TMA_CAPABILITY)} or later"
    if not gpus:
        return Check("direct transport", "note", f"no GPU; direct reads (TMA) need {needs}")
    old = [
        f"gpu {g.index} ({_dotted(g.capability)})" for g in gpus if g.capability < TMA_CAPABILITY
    ]
    if old:
        return Check("direct transport", "lack", f"{', '.join(old)}: no TMA",
                     f"direct reads need {needs}, as Hopper and Blackwell have")  # fmt: skip
    small = [
        f"gpu {g.index} ({g.shared_bytes >> 10} KiB)"
        for g in gpus
        if g.shared_bytes < MIN_SHARED_BYTES
    ]
    if small:
        needed = f"{MIN_SHARED_BYTES >> 10} KiB of shared memory a block"
        return Check("direct transport", "lack", f"{', '.join(small)}: kernels need {needed}, so "
                     "models run on plain torch there, which is slower",
                     "the kernels run on Hopper and Blackwell")  # fmt: skip
    return Check("direct transport", "ok", "kernels can read remote memory directly (TMA)")


def kernels(gpus: Sequence[Gpu]) -> list[Check]:
    """How the kernels run on each GPU that they are built for, or on the card it is held to."""
    checks = []
    for g in gpus:
        from dakrun.kernels.runtime import held_card

        own = Card.of(_dotted(g.capability), sms=1, shared_bytes_per_sm=g.shared_bytes + 1024)
        card = held_card() or own
        if not card.runs_kernels:
            continue
        built = f"held to {card.capability}" if held_card() else f"built for {card.capability}"
        if card.capability not in RUN_ON and not held_card():
            built += ", not yet run on it"
        finding = f"{built}: {how_kernels_run(card)}"
        checks.append(Check(f"kernels gpu {g.index}", "ok", finding))
    return checks


def host_memory(gpus: Sequence[Gpu], root: Path = ROOT) -> Check:
    """Host memory that is available, and the cgroup's limit."""
    limit = cgroup_limit(root)
    cgroup = "no cgroup limit" if limit is None else f"the cgroup allows {format_bytes(limit)}"
    available = format_bytes(available_host_memory())
    return Check("host memory", "ok", f"{available} available, {cgroup}")


def page_locking(gpus: Sequence[Gpu]) -> Check:
    """RLIMIT_MEMLOCK, which cudaHostRegister usually ignores."""
    soft = lock_limit()
    if soft is None:
        return Check("page locking", "ok", "no limit (ulimit -l)")
    return Check(
        "page locking", "note", f"ulimit -l is {format_bytes(soft)}; CUDA's page-locked memory "
        "usually does not count, but some containers refuse it",
        "only if page-locking fails: ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )  # fmt: skip


def numa(gpus: Sequence[Gpu], root: Path = ROOT) -> Check:
    """NUMA nodes, and the node of each GPU."""
    nodes = numa_nodes(root)
    finding = f"{nodes} node{'s' if nodes > 1 else ''}" if nodes else "the kernel reports no nodes"
    for g in gpus:
        node = numa_node(g.address, root)
        where = "an unknown node" if node is None else f"node {node}"
        finding += f"; gpu {g.index} is on {where}"
    return Check("numa", "ok" if nodes else "note", finding)


def pcie(gpus: Sequence[Gpu], root: Path = ROOT) -> list[Check]:
    """The PCIe link of each GPU, which limits reads of host memory."""
    checks = []
    for g in gpus:
        folder = root / "sys/bus/pci/devices" / g.address
        current, best = (
            tuple(_read(folder / f"{kind}_link_{what}") for what in ("speed", "width"))
            for kind in ("current", "max")
        )
        name, finding = f"pcie gpu {g.index}", f"{_link(*current)} ({g.address})"
        if not all(current):
            checks.append(
                Check(name, "note", f"the kernel does not report the link of {g.address}")
            )
        elif current == best or not all(best):
            checks.append(Check(name, "ok", finding))
        elif current[1] == best[1]:
            checks.append(Check(name, "note", f"{finding}; up to {_link(*best)} under load"))
        else:
            finding += f", which could be {_link(*best)}"
            remedy = "check the slot, the riser and the firmware's PCIe setting"
            checks.append(Check(name, "lack", finding, remedy))
    return checks


def nvlink(gpus: Sequence[Gpu]) -> list[Check]:
    """The NVLink links of each GPU that has any."""
    checks = []
    for g in gpus:
        status = _output("nvidia-smi", "nvlink", "--status", "-i", g.address)
        rates = [float(rate) for rate in re.findall(r"Link\s+\d+:\s*([\d.]+)\s*GB/s", status)]
        if rates:
            nearest = min(NVLINK_GENERATIONS, key=lambda known: abs(known - rates[0]))
            known = abs(nearest - rates[0]) < 0.2
            generation = f"NVLink {NVLINK_GENERATIONS[nearest]}" if known else "NVLink"
            finding = f"{generation}, {len(rates)} links of {rates[0]:g} GB/s each way"
            checks.append(Check(f"nvlink gpu {g.index}", "ok", finding))
    return checks


def peers(gpus: Sequence[Gpu]) -> list[Check]:
    """Peer access between GPUs."""
    if len(gpus) < 2:
        return []
    from torch.cuda import can_device_access_peer

    pairs = [(a.index, b.index) for a in gpus for b in gpus if a != b]
    readable = [f"{a} reads {b}" for a, b in pairs if can_device_access_peer(a, b)]
    if len(readable) == len(pairs):
        return [Check("peer gpus", "ok", f"each of the {len(gpus)} GPUs can read every other's")]
    return [Check("peer gpus", "note", ", ".join(readable) or "none can read another's memory")]


def gpu_facts(index: int, host_memory: int) -> dict[str, int | str]:
    """Sizes and links of a GPU and its host, for a profile's readers; `host_memory` is in bytes."""
    import torch

    from dakrun.kernels.runtime import described_card

    card = described_card(torch.device("cuda", index))
    properties = torch.cuda.get_device_properties(index)
    gpus = [gpu for gpu in visible_gpus() if gpu.index == index]
    return {
        "compute_capability": card.capability,
        "shared_bytes_per_sm": card.shared_bytes_per_sm,
        "l2_bytes": properties.L2_cache_size,
        "host_memory_bytes": host_memory,
        "numa": numa(gpus).finding,
        "pcie": "; ".join(check.finding for check in pcie(gpus)),
        **({"nvlink": links[0].finding} if (links := nvlink(gpus)) else {}),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def _driver_cuda() -> int:
    """CUDA version that the driver supports, 13000 for 13.0; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _free_memory(gpu: Gpu) -> str:
    from torch.cuda import mem_get_info

    try:
        return f" ({format_bytes(mem_get_info(gpu.index)[0])} free)"
    except Exception:  # no context: the GPU is full, or in exclusive use
        return " (free memory unknown: creating a context failed)"


def _link(speed: str, width: str) -> str:
    """PCIe 5.0 x16 from "32.0 GT/s PCIe" and "16"."""
    generation = PCIE_GENERATIONS.get(speed.split()[0] if speed else "")
    return f"PCIe {generation}.0 x{width}" if generation else f"{speed or 'unknown'} x{width}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _output(*command: str) -> str:
    """The output of `command`; empty if it is missing, fails or hangs."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return run.stdout if run.returncode == 0 else ""


def _read(path: Path) -> str:
    """A small file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
