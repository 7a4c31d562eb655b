"""The doctor: every finding from files and packages that the tests lay out, and it never raises."""

import importlib.metadata
import io
import json
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from dakrun.cli import doctor, main
from dakrun.cli.doctor import Check, can_generate, examine, render, verdict
from dakrun.doctor import machine as machine_checks
from dakrun.doctor.machine import Gpu
from dakrun.errors import UsageError

H200 = Gpu(0, "NVIDIA H200", (9, 0), 150_000_000_000, "0000:1b:00.0", 227 * 1024)
A100 = Gpu(1, "NVIDIA A100-SXM4-80GB", (8, 0), 85_000_000_000, "0000:43:00.0")
VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n"
    "GCC version:  gcc version 13.3.0\n"
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No driver library, other processes that fail, a cache folder of the test's own."""
    # An inner name: replacing ctypes.CDLL would break torch.
    monkeypatch.setattr(machine_checks, "_driver_cuda", lambda: 0)
    processes_print(monkeypatch, "ImportError: no such thing", code=1)
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(tmp_path / "cache"))


def processes_print(monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> None:
    """Processes are not started; they print `text`, to stderr if their exit code is not 0."""
    done = subprocess.CompletedProcess([], code, stdout=text, stderr=text if code else "")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    names = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(package: str) -> str:
        if package not in names:
            raise importlib.metadata.PackageNotFoundError(package)
        return names[package]

    monkeypatch.setattr(importlib.metadata, "version", version)


def found(name: str, *gpus: Gpu) -> Check:
    """The check called `name` of a machine with `gpus`."""
    (check,) = [check for check in examine(gpus) if check.name == name]
    return check


def test_a_lack_needs_a_remedy() -> None:
    with pytest.raises(ValueError, match="remedy"):
        Check("x", "lack", "is not there")


def test_this_machine() -> None:
    checks = examine()
    named = {check.name: check for check in checks}
    assert named["torch"].status == named["python"].status == named["generate"].status == "ok"
    assert can_generate(checks)
    assert not [check for check in checks if "could not be checked" in check.finding]
    assert not [check for check in checks if "\n" in check.finding + check.remedy]


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_generate_cannot_run_without(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "torch":
        monkeypatch.setitem(sys.modules, "torch", None)
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == name:
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as exit:
        main(["doctor", "--json"])
    assert exit.value.code == 3
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks[name]["status"] == checks["generate"]["status"] == "lack"
    assert checks[name]["remedy"].startswith("pip install") and name in checks[name]["remedy"]
    assert checks["generate"]["remedy"] == f"fix above: {name}"


def test_a_check_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_usage(path: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    check = found("cache")
    assert check.status == "note" and check.finding.endswith("(two lines)")


def test_python_outside_of_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    check = found("python")
    assert (check.status, check.finding) == ("lack", "3.14.0")


@pytest.mark.parametrize(
    ("kernel", "cuda", "status", "finding"),
    [
        ("580.65.06", 13000, "ok", "580.65.06, up to CUDA 13.0"),
        ("570.124", 12080, "lack", "570.124, up to CUDA 12.8"),
        ("", 13010, "ok", "up to CUDA 13.1"),
        ("590.10", 0, "ok", "590.10"),
        ("", 0, "note", "no NVIDIA driver; only a GPU needs it"),
    ],
)
def test_driver(
    kernel: str, cuda: int, status: str, finding: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine_checks, "_driver_cuda", lambda: cuda)
    if kernel:
        write(tmp_path / "proc/driver/nvidia/version", VERSION.format(kernel))
    found = machine_checks.driver([], tmp_path)
    assert (found.status, found.finding) == (status, finding)
    assert ("580" in found.remedy) == (status == "lack")


def test_direct_transport() -> None:
    assert machine_checks.direct_transport([H200]).status == "ok"
    assert machine_checks.direct_transport([]).status == "note"
    found = machine_checks.direct_transport([H200, A100])
    assert (found.status, found.finding) == ("lack", "gpu 1 (8.0): no TMA")
    assert "compute capability 9.0 or later" in found.remedy
    rtx = Gpu(0, "NVIDIA RTX PRO 6000", (12, 0), 96_000_000_000, "0000:1b:00.0", 99 * 1024)
    assert machine_checks.direct_transport([rtx]).status == "ok"
    found = machine_checks.direct_transport([replace(rtx, shared_bytes=64 * 1024)])
    assert found.status == "lack" and "gpu 0 (64 KiB)" in found.finding
    assert "99 KiB" in found.finding and "plain torch" in found.finding


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(machine_checks, "gpu_names", lambda: ["NVIDIA H200"])
    for built, remedy in ((None, "torch built with CUDA"), ("13.0", "CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(torch.version, "cuda", built)
        (found,) = machine_checks.gpu([])
        assert (found.status, found.finding) == ("lack", "NVIDIA H200: torch cannot use it")
        assert remedy in found.remedy
    monkeypatch.setattr(machine_checks, "gpu_names", list)
    assert machine_checks.gpu([])[0].status == "note"


def test_gpus_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=H200.memory_bytes,
        shared_memory_per_block_optin=227 * 1024,
        pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 30, 2 << 30))
    assert machine_checks.visible_gpus() == [H200]
    (found,) = machine_checks.gpu([H200])
    assert (found.name, found.status) == ("gpu 0", "ok")
    assert found.finding == ("NVIDIA H200, compute capability 9.0, 139.70 GiB (1.00 GiB free)")


@pytest.mark.parametrize("name", ["cupy", "nvrtc", "cuda headers"])
def test_what_kernels_need_is_a_lack_on_a_gpu_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    on_gpu, on_cpu = found(name, H200), found(name)
    assert (on_gpu.status, on_cpu.status) == ("lack", "note")
    assert on_gpu.remedy == on_cpu.remedy == "pip install 'dakrun[cuda13]'"
    installed(monkeypatch, cupy_cuda13x="14.2.0", cuda_bindings="13.0.3")
    assert found(name, H200).status == "lack"  # installed, and broken


def test_what_kernels_need_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, cupy_cuda13x="14.2.0", cuda_bindings="13.0.3", nvidia_cuda_runtime="13")
    processes_print(monkeypatch, "some warning\n13.0\n")
    headers = [importlib.metadata.PackagePath("nvidia/cu13/include/cuda_fp16.h")]
    monkeypatch.setattr(importlib.metadata, "files", lambda package: headers)
    cupy, nvrtc, headers_check = (found(n, H200) for n in ("cupy", "nvrtc", "cuda headers"))
    assert cupy.status == nvrtc.status == headers_check.status == "ok"
    assert cupy.finding.startswith("cupy-cuda13x 14.2.0")
    assert nvrtc.finding == "13.0, cuda-bindings 13.0.3"
    assert headers_check.finding == "in nvidia-cuda-runtime 13"


def test_two_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, cupy_cuda13x="14.2.0", cupy="14.2.0")
    check = found("cupy")
    assert check.status == "lack" and "pip uninstall cupy-cuda13x cupy;" in check.remedy


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (1, "Traceback:\nModuleNotFoundError: no cupy\n\n", "(ModuleNotFoundError: no cupy)"),
        (-11, "", "(exit code -11)"),
    ],
)
def test_a_package_that_breaks_another_process(
    code: int, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, cupy_cuda13x="14.2.0")
    processes_print(monkeypatch, text, code)
    check = found("cupy", H200)
    assert check.status == "lack" and check.finding.endswith(reason)


def test_another_process_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    installed(monkeypatch, cupy_cuda13x="14.2.0")
    monkeypatch.setattr(subprocess, "run", run)
    check = found("cupy", H200)
    assert check.status == "lack" and "timed out" in check.finding


@pytest.mark.parametrize(
    ("text", "finding"),
    [("max\n", "no cgroup limit"), ("34359738368\n", "the cgroup allows 32.00 GiB")],
)
def test_host_memory(text: str, finding: str, tmp_path: Path) -> None:
    write(tmp_path / "sys/fs/cgroup/memory.max", text)
    assert machine_checks.host_memory([], tmp_path).finding.endswith(f" available, {finding}")
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    assert "no cgroup limit" in machine_checks.host_memory([], tmp_path).finding


def test_page_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 8 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits["soft"], -1))
    found = machine_checks.page_locking([])
    assert found.status == "note" and "8.00 MiB" in found.finding and "memlock" in found.remedy
    limits["soft"] = resource.RLIM_INFINITY
    assert machine_checks.page_locking([]).status == "ok"


def test_numa(tmp_path: Path) -> None:
    assert machine_checks.numa([], tmp_path).status == "note"
    for node in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    write(tmp_path / "sys/bus/pci/devices" / H200.address / "numa_node", "1\n")
    write(tmp_path / "sys/bus/pci/devices" / A100.address / "numa_node", "-1\n")
    finding = machine_checks.numa([H200, A100], tmp_path).finding
    assert finding == "2 nodes; gpu 0 is on node 1; gpu 1 is on an unknown node"


@pytest.mark.parametrize(
    ("now", "most", "status", "finding"),
    [
        (("32.0 GT/s PCIe", "16"), ("32.0 GT/s PCIe", "16"), "ok", "PCIe 5.0 x16 (0000:1b:00.0)"),
        (("2.5 GT/s PCIe", "16"), ("32.0 GT/s PCIe", "16"), "note", "PCIe 5.0 x16"),
        (("32.0 GT/s PCIe", "8"), ("32.0 GT/s PCIe", "16"), "lack", "PCIe 5.0 x16"),
        (("Unknown", "16"), ("", ""), "ok", "Unknown x16"),
        (("", ""), ("", ""), "note", "the link of 0000:1b:00.0"),
    ],
)
def test_pcie(
    now: tuple[str, str], most: tuple[str, str], status: str, finding: str, tmp_path: Path
) -> None:
    folder = tmp_path / "sys/bus/pci/devices" / H200.address
    for kind, values in (("current", now), ("max", most)):
        for what, value in zip(("speed", "width"), values, strict=True):
            if value:
                write(folder / f"{kind}_link_{what}", value + "\n")
    (found,) = machine_checks.pcie([H200], tmp_path)
    assert found.status == status and finding in found.finding
    assert machine_checks.pcie([], tmp_path) == []


NVLINK = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n" + "".join(
    f"\t Link {i}: 26.562 GB/s\n" for i in range(18)
)


@pytest.mark.parametrize(
    ("said", "finding"),
    [
        (NVLINK, "NVLink 4, 18 links of 26.562 GB/s each way"),
        (NVLINK.replace("26.562", "25"), "NVLink 3, 18 links of 25 GB/s each way"),
        (NVLINK.replace("26.562", "99"), "NVLink, 18 links of 99 GB/s each way"),
        ("GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n", "NVLink 4, 1 link"),
        ("GPU 0: NVIDIA H200\n\t Link 0: <inactive>\n", ""),
        ("Unable to retrieve NVLink information as all links are inActive\n", ""),
        ("", ""),
    ],
)
def test_nvlink(said: str, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes_print(monkeypatch, said)
    found = [check.finding for check in machine_checks.nvlink([H200])]
    assert len(found) == bool(finding) and all(text.startswith(finding) for text in found)


def test_nvidia_smi_that_fails_or_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*command: object, **options: object) -> None:
        raise FileNotFoundError

    processes_print(monkeypatch, NVLINK, code=1)
    assert machine_checks.nvlink([H200]) == []
    monkeypatch.setattr(subprocess, "run", missing)
    assert machine_checks.nvlink([H200]) == []


def test_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert machine_checks.peers([H200]) == []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert machine_checks.peers([H200, A100])[0].status == "ok"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    assert machine_checks.peers([H200, A100]) == [Check("peer gpus", "note", "0 reads 1")]


def test_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inner names: the machine that runs the tests may have a GPU, and a profile of it.
    monkeypatch.setattr(doctor, "gpu_names", list)
    assert found("profile").finding.startswith("cpu ")
    monkeypatch.setattr(doctor, "find_profile", missing_profile)
    check = found("profile", H200)
    assert (check.status, check.finding) == ("lack", "no profile for X")
    assert check.remedy == "name one with --profile"


def missing_profile(device: str) -> None:
    assert device == "cuda"
    raise UsageError("no profile for X", hint="name one with --profile")


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check = found("cache")
    assert check.status == "ok" and check.finding.startswith(str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()  # looking makes nothing
    write(tmp_path / "file", "")
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(tmp_path / "file"))
    check = found("cache")
    assert check.status == "lack" and "DAKRUN_CACHE_DIR" in check.remedy


def test_verdict() -> None:
    lack = Check("cupy", "lack", "not installed", "pip install it")
    assert verdict([H200], [lack]).finding == (
        "runs on the GPU and on the CPU; lacking, see above: cupy"
    )
    assert "a GPU run needs an NVIDIA GPU" in verdict([], []).finding
    assert verdict([], []).status == "ok"


def test_words_carry_the_status() -> None:
    console = Console(width=60, record=True, file=io.StringIO())
    render([Check("a", "ok", "[b]1"), Check("c", "lack", "none", "buy one")], console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines == [
        ["check", "status", "finding"], ["a", "ok", "[b]1"], ["c", "lack", "none"],
        ["remedy:", "buy", "one"],
    ]  # fmt: skip


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["doctor"])
    out, err = capsys.readouterr()
    assert not exit.value.code and not err
    assert out.split()[:3] == ["check", "status", "finding"]
