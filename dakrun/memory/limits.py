"""Limits of host memory for this process, and the NUMA nodes of memory and GPUs.

Reads /proc and /sys below a root folder, and the process's rlimits. Allocates nothing and imports
no torch.
"""

import mmap
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dakrun.errors import CannotRun, UsageError
from dakrun.units import ceil_div, format_bytes

ROOT = Path("/")
THREADS_PER_CORE, LEAST_MAX_THREADS = 4, 64
NO_LIMIT = 1 << 60  # cgroup 1 writes a larger number for "no limit"
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Balloon drivers, which take memory from a virtual machine at run time.
BALLOONS = ("sys/bus/vmbus/drivers/hv_balloon", "sys/devices/system/xen_memory")


@dataclass(frozen=True)
class HostLimit:
    """One bound on host memory: `left` bytes may still be taken; `what` describes it in errors."""

    left: int
    what: str
    hint: str


def available_host_memory(root: Path = ROOT) -> int:
    """Bytes of host memory that this process may still take: the minimum over `host_limits`."""
    return max(0, min(limit.left for limit in host_limits(root)))


def check_host_memory(nbytes: int, root: Path = ROOT) -> None:
    """Raise CannotRun, naming the limit, unless `nbytes` of host memory may be taken."""
    lowest = min(host_limits(root), key=lambda limit: limit.left)
    if nbytes > lowest.left:
        raise CannotRun(
            f"the plan needs {format_bytes(nbytes)} of host memory, "
            f"but only {format_bytes(max(0, lowest.left))} are {lowest.what}",
            hint=lowest.hint,
        )


def host_limits(root: Path = ROOT) -> list[HostLimit]:
    """Every limit on this process's host memory.

    These are free memory (MemAvailable and `unused_ram`), the memory cgroup and its ancestors, the
    address space (ulimit -v and -d) and, under strict overcommit, the kernel's commit limit.
    Raises CannotRun if /proc/meminfo does not give MemAvailable.
    """
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" not in fields or "MemTotal" not in fields:
        raise CannotRun("/proc/meminfo has no MemAvailable", hint="dakrun needs Linux")
    less = "lower --host-budget, --batch-size or --max-model-len"
    limits = [
        HostLimit(
            fields["MemAvailable"] + unused_ram(root),
            "available",
            f"{less}, or use a machine with more memory",
        )
    ]
    for limit, left in _cgroup_limits(root):
        what = f"left under the cgroup's limit of {format_bytes(limit)}"
        hint = f"raise the limit (docker run --memory, systemd MemoryMax), or {less}"
        limits.append(HostLimit(left, what, hint))
    status = _fields(root / "proc/self/status")
    for number, option, used in (
        (resource.RLIMIT_AS, "-v", "VmSize"),
        (resource.RLIMIT_DATA, "-d", "VmData"),
    ):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            left = soft - status.get(used, 0)
            what = f"left under ulimit {option}"
            limits.append(HostLimit(left, what, f"raise the limit: ulimit {option} unlimited"))
    if _read(root / "proc/sys/vm/overcommit_memory") == "2":
        left = fields["CommitLimit"] - fields["Committed_AS"]
        hint = f"let the kernel commit more (sysctl vm.overcommit_memory=0), or {less}"
        limits.append(HostLimit(left, "left under the kernel's commit limit", hint))
    return limits


def unused_ram(root: Path = ROOT) -> int:
    """Bytes of RAM that the kernel has but does not count in MemTotal yet.

    In a large virtual machine the kernel may initialise page descriptors only as memory fills up,
    and MemTotal grows with them. The RAM of the zones (/proc/zoneinfo) is complete from the start.
    Usually it exceeds MemTotal only by the descriptors (1/64) and other kernel memory. So 1/32 of
    it is left out, and the result is 0 if the difference is below 1/8 or may be a balloon's.
    """
    fields, ram = _fields(root / "proc/meminfo"), _zone_ram(root)
    vmstat = _fields(root / "proc/vmstat", unit=mmap.PAGESIZE)
    balloon = vmstat.get("balloon_inflate", 0) - vmstat.get("balloon_deflate", 0)
    missing = ram - fields.get("MemTotal", ram)
    if missing <= ram // 8 or balloon > 0 or any((root / path).exists() for path in BALLOONS):
        return 0
    return missing - ram // 32


def cgroup_limit(root: Path = ROOT) -> int | None:
    """The lowest limit in bytes of this process's memory cgroup and its ancestors; else None."""
    return min((limit for limit, _ in _cgroup_limits(root)), default=None)


def lock_limit() -> int | None:
    """RLIMIT_MEMLOCK (ulimit -l) in bytes, None if unlimited.

    NVIDIA's driver usually ignores it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def pci_address(properties: Any) -> str:
    """PCI address of a GPU in the format of /sys, from torch's device properties."""
    parts = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def usable_cores(root: Path = ROOT) -> int:
    """CPU cores that this process may use: those of its affinity, at most its cgroups' quotas."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(root, "cpu"):
        quota, period, *_ = [*_read(folder / "cpu.max").split(), "", ""]  # cgroup 2
        if not quota:
            quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():  # else "max", or -1 in cgroup 1
            cores = min(cores, ceil_div(int(quota), int(period)))
    return max(1, cores)


def check_threads(threads: int) -> None:
    """Raise UsageError for more threads than make sense: OpenMP crashes if it cannot start them."""
    most = max(LEAST_MAX_THREADS, THREADS_PER_CORE * usable_cores())
    if threads > most:
        raise UsageError(
            f"threads is {threads:,}, above the maximum of {most} on this machine",
            hint="leave it out to use all cores; more threads than cores compute more slowly",
        )


def numa_nodes(root: Path = ROOT) -> int:
    """Number of NUMA nodes; 0 if /sys does not list them."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*")))


def numa_node(address: str, root: Path = ROOT) -> int | None:
    """NUMA node of the PCI device at `address`; None if the firmware does not say."""
    text = _read(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdigit() else None  # -1: unknown


def node_memory(node: int, root: Path = ROOT) -> int:
    """Bytes of `node` that are free or can be reclaimed from the page cache."""
    total = 0
    for line in _read(root / f"sys/devices/system/node/node{node}/meminfo").splitlines():
        words = line.split()  # Node 0 MemFree: 123 kB
        if words[2] in ("MemFree:", "Active(file):", "Inactive(file):"):
            total += int(words[3]) * 1024
    return total


def _zone_ram(root: Path) -> int:
    """Bytes of RAM in the kernel's zones, device memory excluded."""
    pages, zone = 0, ""
    for line in _read(root / "proc/zoneinfo").splitlines():
        words = line.split()
        if words[0] == "Node":
            zone = words[-1]
        elif words[0] == "present" and zone != "Device":
            pages += int(words[1])
    return pages * mmap.PAGESIZE


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes left) of this process's memory cgroup and its ancestors."""
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, usage_file in CGROUP_FILES:
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit.isdigit() and int(limit) < NO_LIMIT:
                used = int(usage) if usage.isdigit() else 0
                yield int(limit), int(limit) - used + _file_pages(folder)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and its ancestors, as far as they are visible."""
    mount = root / "sys/fs/cgroup"
    tops = {"": mount, controller: mount / controller}  # cgroup 2 and cgroup 1
    paths = dict.fromkeys(tops, "")
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in paths.keys() & controllers.split(","):
            paths[name] = path.lstrip("/")
    for name, top in tops.items():
        folder = top / paths[name]
        # In a container the path may be the host's; the process is then in the top folder.
        if ".." in folder.parts or not folder.is_dir():
            folder = top
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _file_pages(folder: Path) -> int:
    """Bytes of page cache, which a cgroup counts as used but reclaims under pressure."""
    stat = _fields(folder / "memory.stat", unit=1)
    return sum(  # cgroup 1 writes the sums over descendants as total_*
        stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file")
    )


def _fields(path: Path, unit: int = 1024) -> dict[str, int]:
    """Name to number, times `unit`, from lines like "MemFree: 123 kB"."""
    words = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {w[0]: int(w[1]) * unit for w in words if len(w) > 1 and w[1].isdigit()}


def _read(path: Path) -> str:
    """Text of a small file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
