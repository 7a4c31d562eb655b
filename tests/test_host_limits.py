"""Limits of host memory on made-up machines: the kernel's, cgroups', rlimits; NUMA nodes."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from dakrun.errors import CannotRun
from dakrun.memory import limits
from dakrun.memory.limits import available_host_memory, check_host_memory

KIB, GIB = 2**10, 2**30
LAZY = 256  # GiB of a virtual machine whose MemTotal grows with use


@pytest.fixture(autouse=True)
def no_rlimits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The soft rlimits; none at first."""
    soft: dict[int, int] = {}
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (soft.get(which, resource.RLIM_INFINITY), -1)
    )
    return soft


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def make_machine(root: Path, *, total: int = 64, available: int = 48, ram: int = 0) -> Path:
    """A root folder of a machine with GiB of MemTotal, MemAvailable and RAM in its zones."""
    fields = {"MemTotal": total, "MemFree": 1, "MemAvailable": available}
    fields |= {"CommitLimit": total // 2, "Committed_AS": 10}
    write(root / "proc/meminfo", "\n".join(f"{k}:  {v * 2**20} kB" for k, v in fields.items()))
    pages = (ram or total) * GIB // 4096
    write(
        root / "proc/zoneinfo",
        f"Node 0, zone    DMA32\n        spanned  9\n        present  {pages // 4}\n"
        f"Node 0, zone   Normal\n        present  {pages - pages // 4}\n        managed  7\n"
        "Node 0, zone   Device\n        present  99999999\n",
    )
    return root


def test_free_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_host_memory(make_machine(tmp_path)) == 48 * GIB
    assert available_host_memory() > 0  # of this machine


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 1 kB")
    with pytest.raises(CannotRun, match="no MemAvailable"):
        available_host_memory(tmp_path)


def test_ram_that_is_not_in_use_yet_counts(tmp_path: Path) -> None:
    make_machine(tmp_path, total=31, available=29, ram=LAZY)
    assert available_host_memory(tmp_path) == (29 + LAZY - 31 - LAZY // 32) * GIB
    make_machine(tmp_path, total=251, available=59, ram=LAZY)  # 192 GiB later
    assert available_host_memory(tmp_path) == 59 * GIB


@pytest.mark.parametrize("total", [64, 63, 57])
def test_what_the_kernel_keeps_for_itself_does_not_count(total: int, tmp_path: Path) -> None:
    assert available_host_memory(make_machine(tmp_path, total=total, ram=64)) == 48 * GIB


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("proc/vmstat", "nr_free_pages 3\nballoon_inflate 500\nballoon_deflate 100"),
        ("sys/bus/vmbus/drivers/hv_balloon/uevent", ""),
        ("sys/devices/system/xen_memory/xen_memory0/target", ""),
    ],
)
def test_what_a_balloon_took_does_not_count(path: str, text: str, tmp_path: Path) -> None:
    make_machine(tmp_path, total=31, available=29, ram=LAZY)
    write(tmp_path / "proc/vmstat", "balloon_inflate 500\nballoon_deflate 500")
    assert available_host_memory(tmp_path) > 200 * GIB
    write(tmp_path / path, text)
    assert available_host_memory(tmp_path) == 29 * GIB


def test_no_zoneinfo(tmp_path: Path) -> None:
    (make_machine(tmp_path) / "proc/zoneinfo").unlink()
    assert available_host_memory(tmp_path) == 48 * GIB


def make_cgroup(folder: Path, limit: object, used: int, cache: int = 0, version: int = 2) -> None:
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        write(folder / f"memory.{name}", value)
    prefix = "total_" if version == 1 else ""
    stat = f"anon 77\n{prefix}inactive_file {cache // 2}\n{prefix}active_file {cache // 2}"
    write(folder / "memory.stat", stat)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_counts(version: int, tmp_path: Path) -> None:
    top = make_machine(tmp_path) / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    lines = ["3:cpu:/other", "4:memory:/a/b" if version == 1 else "0::/a/b"]
    write(tmp_path / "proc/self/cgroup", "\n".join(lines))
    unlimited: object = 0x7FFFFFFFFFFFF000 if version == 1 else "max"
    make_cgroup(top, unlimited, 50 * GIB, version=version)
    make_cgroup(top / "a", 32 * GIB, 20 * GIB, 4 * GIB, version)
    make_cgroup(top / "a/b", unlimited, 2 * GIB, version=version)
    assert available_host_memory(tmp_path) == 16 * GIB
    assert limits.cgroup_limit(tmp_path) == 32 * GIB
    make_cgroup(top / "a/b", 8 * GIB, 2 * GIB, 1 * GIB, version)
    assert available_host_memory(tmp_path) == 7 * GIB
    make_cgroup(top / "a/b", GIB, 2 * GIB, version=version)
    assert available_host_memory(tmp_path) == 0


def test_memory_high_counts(tmp_path: Path) -> None:
    top = make_machine(tmp_path) / "sys/fs/cgroup"
    make_cgroup(top, "max", GIB)
    write(top / "memory.high", 3 * GIB)
    assert available_host_memory(tmp_path) == 2 * GIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../../outside", "/"])
def test_a_container_sees_its_own_cgroup_at_the_top(path: str, tmp_path: Path) -> None:
    top = make_machine(tmp_path) / "sys/fs/cgroup"
    write(tmp_path / "proc/self/cgroup", f"0::{path}")
    make_cgroup(top, 4 * GIB, GIB)
    assert available_host_memory(tmp_path) == 3 * GIB


def test_a_limit_above_memory_makes_none(tmp_path: Path) -> None:
    make_cgroup(make_machine(tmp_path) / "sys/fs/cgroup", 500 * GIB, GIB)
    assert available_host_memory(tmp_path) == 48 * GIB


@pytest.mark.parametrize(
    ("which", "option", "field"),
    [(resource.RLIMIT_AS, "-v", "VmSize"), (resource.RLIMIT_DATA, "-d", "VmData")],
)
def test_rlimits_count_from_what_is_used(
    which: int, option: str, field: str, tmp_path: Path, no_rlimits: dict[int, int]
) -> None:
    write(make_machine(tmp_path) / "proc/self/status", f"Name:\tx\n{field}:\t {2**20} kB")
    no_rlimits[which] = 5 * GIB
    assert available_host_memory(tmp_path) == 4 * GIB
    with pytest.raises(CannotRun, match=f"4.00 GiB are left under ulimit {option}") as caught:
        check_host_memory(4 * GIB + 1, tmp_path)
    assert caught.value.hint == f"raise the limit: ulimit {option} unlimited"


def test_the_commit_limit_counts_where_it_is_kept(tmp_path: Path) -> None:
    make_machine(tmp_path)
    write(tmp_path / "proc/sys/vm/overcommit_memory", 0)
    assert available_host_memory(tmp_path) == 48 * GIB
    write(tmp_path / "proc/sys/vm/overcommit_memory", 2)
    assert available_host_memory(tmp_path) == 22 * GIB


def test_what_is_short_is_said_with_a_hint(tmp_path: Path) -> None:
    make_machine(tmp_path)
    check_host_memory(48 * GIB, tmp_path)
    with pytest.raises(CannotRun, match=r"needs 48\.50 GiB .* 48\.00 GiB are available$"):
        check_host_memory(97 * GIB // 2, tmp_path)
    make_cgroup(tmp_path / "sys/fs/cgroup", 16 * GIB, 20 * GIB)
    with pytest.raises(CannotRun, match=r"0 B are left under the cgroup's limit of 16\.00 GiB"):
        check_host_memory(1, tmp_path)
    assert all(limit.hint for limit in limits.host_limits(tmp_path))


def test_page_locking_limit(no_rlimits: dict[int, int]) -> None:
    assert limits.lock_limit() is None
    no_rlimits[resource.RLIMIT_MEMLOCK] = 8 * KIB
    assert limits.lock_limit() == 8 * KIB


def test_numa_node_of_a_gpu(tmp_path: Path) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    address = limits.pci_address(properties)
    assert address == "0000:1b:00.0"
    assert limits.numa_node(address, tmp_path) is None
    for text, node in (("1", 1), ("-1", None)):
        write(tmp_path / "sys/bus/pci/devices" / address / "numa_node", text)
        assert limits.numa_node(address, tmp_path) == node
    fields = {"MemTotal": 90, "MemFree": 5, "Active(file)": 2, "Inactive(file)": 1}
    text = "\n".join(f"Node 1 {name}: {n} kB" for name, n in fields.items())
    write(tmp_path / "sys/devices/system/node/node1/meminfo", text)
    assert limits.numa_nodes(tmp_path) == 1
    assert limits.node_memory(1, tmp_path) == 8 * KIB
    assert limits.node_memory(7, tmp_path) == 0


@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [
        ("max 100000", "max 100000", 64),
        ("250000 100000", "max 100000", 3),
        ("max 100000", "50000 100000", 1),
        ("1600000 100000", "800000 100000", 8),
        ("", "", 64),  # the root of the machine's cgroups has no limits
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_those_of_the_affinity_and_of_the_quota(
    version: int, own: str, above: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    top = tmp_path / "sys/fs/cgroup" / ("cpu" if version == 1 else "")
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/a/b" if version == 1 else "0::/a/b")
    for folder, text in ((top / "a/b", own), (top / "a", above)):
        if version == 2:
            write(folder / "cpu.max", text)
        elif text:
            quota, period = text.split()
            write(folder / "cpu.cfs_quota_us", "-1" if quota == "max" else quota)
            write(folder / "cpu.cfs_period_us", period)
    assert limits.usable_cores(tmp_path) == cores
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert limits.usable_cores(tmp_path) == 1
