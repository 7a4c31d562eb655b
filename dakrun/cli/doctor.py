"""The checks of `dakrun doctor`, each with its finding, and with a remedy if something is missing.

Checks Python packages, the profile and the cache folder; dakrun/doctor/machine.py checks the
hardware. CuPy and NVRTC are loaded in other processes, so that a crash there does no harm here.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from dakrun.doctor.machine import (
    Check,
    Gpu,
    direct_transport,
    driver,
    gpu,
    host_memory,
    kernels,
    numa,
    nvlink,
    page_locking,
    pcie,
    peers,
    visible_gpus,
)
from dakrun.errors import DakrunError
from dakrun.hardware import find_profile, gpu_names
from dakrun.resources import cache_dir
from dakrun.tables import Column, print_table
from dakrun.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = Column("check", "left"), Column("status", "left"), Column("finding", "left", wraps=True)
PACKAGES = ("transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy")
ESSENTIAL = ("python", "torch", *PACKAGES)  # generate cannot run without these
CUDA_EXTRA = "pip install 'dakrun[cuda13]'"
NO_GPU = "only a GPU needs it"
CUPY_CODE = "import cupy; print(cupy.__version__)"
NVRTC_CODE = "from cuda.bindings import nvrtc; print(*nvrtc.nvrtcVersion()[1:], sep='.')"


def examine(gpus: Sequence[Gpu] | None = None) -> list[Check]:
    """Run all checks, for `gpus` or else the GPUs that torch can use; never raises."""
    gpus = visible_gpus() if gpus is None else gpus
    checks: list[Check] = []
    for check in CHECKS:
        try:
            result = check(gpus)
        except Exception as problem:
            name = check.__name__.replace("_", " ")
            result = Check(name, "note", f"could not be checked ({_one_line(problem)})")
        checks += [result] if isinstance(result, Check) else result
    return [*checks, verdict(gpus, checks)]


def verdict(gpus: Sequence[Gpu], checks: Sequence[Check]) -> Check:
    """Whether `dakrun generate` runs here, and on which devices, given the other `checks`."""
    lacks = [check.name for check in checks if check.status == "lack"]
    if not can_generate(checks):
        essential = ", ".join(name for name in lacks if name in ESSENTIAL)
        return Check("generate", "lack", "cannot run here", f"fix above: {essential}")
    lacking = f"; lacking, see above: {', '.join(lacks)}" if lacks else ""
    if gpus:
        return Check("generate", "ok", f"runs on the GPU and on the CPU{lacking}")
    needs = f"an NVIDIA GPU, its driver, a torch built with CUDA, and: {CUDA_EXTRA}"
    finding = "runs on the CPU with the reference kernels; a GPU run needs "
    return Check("generate", "ok", finding + needs + lacking)


def can_generate(checks: Sequence[Check]) -> bool:
    """Whether `dakrun generate` can run at all, if only on the CPU."""
    return not any(check.status == "lack" and check.name in ESSENTIAL for check in checks)


def render(checks: Sequence[Check], console: "Console") -> None:
    """Print the checks as a table, each remedy below its finding."""
    remedies = [f"\nremedy: {check.remedy}" if check.remedy else "" for check in checks]
    rows = [
        (check.name, check.status, check.finding + remedy)
        for check, remedy in zip(checks, remedies, strict=True)
    ]
    print_table(console, COLUMNS, rows, gap=2)


def python(gpus: Sequence[Gpu]) -> Check:
    """The version of Python: 3.11 to 3.13 are supported."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("python", "ok", version)
    return Check("python", "lack", version, "make an environment with Python 3.11 to 3.13")


def torch(gpus: Sequence[Gpu]) -> Check:
    """The version of torch, and the CUDA version that it was built for."""
    try:
        module: Any = import_module("torch")
    except Exception as problem:
        return Check("torch", "lack", f"cannot be imported ({_one_line(problem)})",
                     "pip install --force-reinstall 'torch>=2.11,<2.14'")  # fmt: skip
    built = f"built for CUDA {module.version.cuda}" if module.version.cuda else "built without CUDA"
    return Check("torch", "ok", f"{module.__version__}, {built}")


def packages(gpus: Sequence[Gpu]) -> list[Check]:
    """The other packages that every run needs, one check each."""
    return [
        Check(name, "ok", version)
        if (version := _version(name))
        else Check(name, "lack", "not installed", f"pip install {name}")
        for name in PACKAGES
    ]


def cupy(gpus: Sequence[Gpu]) -> Check:
    """CuPy, which launches the kernels: installed once, and importable."""
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
    installed = [f"{name} {version}" for name in names if (version := _version(name))]
    if not installed:
        return _missing("cupy", gpus, "not installed", CUDA_EXTRA)
    if len(installed) > 1:
        remedy = f"pip uninstall {' '.join(text.split()[0] for text in installed)}; {CUDA_EXTRA}"
        return Check("cupy", "lack", f"{' and '.join(installed)} conflict", remedy)
    works, answer = _run_python(CUPY_CODE)
    if not works:
        return _missing("cupy", gpus, f"{installed[0]} cannot be imported ({answer})", CUDA_EXTRA)
    return Check("cupy", "ok", f"{installed[0]}, can be imported")


def nvrtc(gpus: Sequence[Gpu]) -> Check:
    """NVRTC, loaded by cuda-bindings; it compiles the kernels and needs no GPU."""
    version = _version("cuda-bindings")
    if not version:
        return _missing("nvrtc", gpus, "cuda-bindings is not installed", CUDA_EXTRA)
    works, answer = _run_python(NVRTC_CODE)
    if not works:
        problem = f"cuda-bindings {version}, but NVRTC does not load ({answer})"
        return _missing("nvrtc", gpus, problem, CUDA_EXTRA)
    return Check("nvrtc", "ok", f"{answer}, cuda-bindings {version}")


def cuda_headers(gpus: Sequence[Gpu]) -> Check:
    """The CUDA headers, such as cuda_fp16.h, which the kernels include."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13"):
        if any(file.name == "cuda_fp16.h" for file in _package_files(name)):
            return Check("cuda headers", "ok", f"in {name} {_version(name)}")
    return _missing("cuda headers", gpus, "nvidia-cuda-runtime is not installed", CUDA_EXTRA)


def profile(gpus: Sequence[Gpu]) -> Check:
    """The hardware profile that --profile auto finds here."""
    try:
        chosen = find_profile(device="cuda" if gpus or gpu_names() else "cpu")
    except DakrunError as problem:
        return Check("profile", "lack", str(problem), problem.hint)
    return Check("profile", "ok", f"{chosen.name} ({chosen.provenance.kind})")


def cache(gpus: Sequence[Gpu]) -> Check:
    """The cache folder: whether it is writable, and the free space on its disk."""
    folder = cache_dir().expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check("cache", "lack", f"{folder}: not writable",
                     "make it writable, or set DAKRUN_CACHE_DIR to another folder")  # fmt: skip
    return Check("cache", "ok", f"{folder}, {format_bytes(shutil.disk_usage(existing).free)} free")


CHECKS: tuple[Callable[..., Check | list[Check]], ...] = (
    python, torch, packages, gpu, driver, direct_transport, kernels, cupy, nvrtc, cuda_headers,
    host_memory, page_locking, numa, pcie, nvlink, peers, profile, cache,
)  # fmt: skip


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _package_files(package: str) -> Sequence[metadata.PackagePath]:
    return (metadata.files(package) or []) if _version(package) else []


def _missing(name: str, gpus: Sequence[Gpu], finding: str, remedy: str) -> Check:
    """A lack if there is a GPU, else a note."""
    if gpus:
        return Check(name, "lack", finding, remedy)
    return Check(name, "note", f"{finding}; {NO_GPU}", remedy)


def _run_python(code: str) -> tuple[bool, str]:
    """Run `code` in another interpreter: whether it succeeded, and the last line of its output."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return False, _one_line(problem)
    lines = (run.stderr if run.returncode else run.stdout).split("\n")
    output = [line.strip() for line in lines if line.strip()]
    return run.returncode == 0, output[-1] if output else f"exit code {run.returncode}"


def _one_line(problem: Exception) -> str:
    return (" ".join(str(problem).split()) or type(problem).__name__)[:160]
