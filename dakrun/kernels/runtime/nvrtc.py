"""Compiles CUDA sources of native/ to cubins with NVRTC, and reads the compiler's report.

Needs no GPU and no driver. Knows nothing of what a kernel computes or how it is launched.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dakrun.errors import CannotRun
from dakrun.geometry import CUDA_CONSTANTS, KERNEL_TARGETS
from dakrun.resources import resource_dir

ARCHITECTURES = KERNEL_TARGETS
HINT = "install dakrun's CUDA packages: pip install 'dakrun[cuda13]'"

# -v: ptxas reports registers, spills and wgmma warnings (C75xx) in the log.
OPTIONS = (
    "-std=c++17",
    "-default-device",
    "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
)


class CompileError(CannotRun):
    """A source does not compile; `log` is the compiler's whole output."""

    def __init__(self, message: str, *, hint: str, log: str) -> None:
        super().__init__(message, hint=hint)
        self.log = log


@dataclass(frozen=True)
class KernelReport:
    """ptxas's report on one kernel: registers and bytes per thread, shared bytes per CTA."""

    name: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spills(self) -> bool:
        """Whether registers spill to local memory."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


@dataclass(frozen=True)
class Compiled:
    """A cubin, the PTX it was made of, and the compiler's log."""

    cubin: bytes
    ptx: str
    log: str

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """Reports on all kernels, in the order of the log."""
        return parse_report(self.log)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log on spills and on serialised wgmma (C75xx)."""
        pattern = re.compile(r"C75\d\d|Potential Performance Loss|warning.*spill", re.IGNORECASE)
        return tuple(line for line in self.log.splitlines() if pattern.search(line))


def compile_cubin(source: str, arch: str, defines: Mapping[str, int] | None = None) -> Compiled:
    """Compile native/`source` for `arch`, such as sm_90a, with CUDA_CONSTANTS and `defines`.

    Raises CompileError with the compiler's message and the options, CannotRun where the CUDA
    packages are missing.
    """
    nvrtc = _nvrtc()
    folder = resource_dir("native")
    includes = f"-I{folder}", f"-I{_cuda_headers()}"
    options = [f"-arch={arch}", *OPTIONS, *_defines(defines), *includes]
    text = (folder / source).read_bytes()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = bytes(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        text_log = log.rstrip(b"\0 \n").decode(errors="replace")
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            first = next((line for line in text_log.splitlines() if "error" in line), "no message")
            raise CompileError(
                f"{source} does not compile for {arch}: {first}",
                hint=f"options were {' '.join(options)}",
                log=text_log,
            )
        cubin = bytes(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        ptx = bytes(_checked(nvrtc, nvrtc.nvrtcGetPTXSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, ptx.rstrip(b"\0").decode(), text_log)


def source_digest(source: str, arch: str, defines: Mapping[str, int] | None = None) -> str:
    """Hex digest of everything that decides the cubin: sources, options, NVRTC's version."""
    nvrtc = _nvrtc()
    version = ".".join(str(number) for number in nvrtc.nvrtcVersion()[1:])
    digest = hashlib.sha256()
    for part in (arch, *OPTIONS, *_defines(defines), version):
        digest.update(part.encode() + b"\0")
    for path in with_includes(resource_dir("native") / source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def with_includes(path: Path) -> list[Path]:
    """`path` and the files of its folder that it includes, directly or indirectly."""
    found, waiting = [], [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text("utf-8"), re.MULTILINE)
        waiting += [file.with_name(name) for name in names]
    return found


def parse_report(log: str) -> tuple[KernelReport, ...]:
    """Parse the reports on all kernels in the output of `ptxas -v`."""
    reports = []
    entries = re.split(r"Compiling entry function '([^']+)'", log)[1:]
    for name, text in zip(entries[::2], entries[1::2], strict=True):
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", text)
        used = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        stack, stores, loads = map(int, frame.groups()) if frame else (0, 0, 0)
        reports.append(
            KernelReport(
                name,
                int(used[1]) if used else 0,
                int(shared[1]) if shared else 0,
                stack,
                stores,
                loads,
            )
        )
    return tuple(reports)


def _defines(defines: Mapping[str, int] | None) -> list[str]:
    """Options for the shared constants and one variant's own macros."""
    macros = {**CUDA_CONSTANTS, **(defines or {})}
    return [f"-D{name}={value}" for name, value in sorted(macros.items())]


@functools.cache
def _cuda_headers() -> str:
    from cuda.pathfinder import find_nvidia_header_directory

    headers = find_nvidia_header_directory("cudart")
    if headers is None:
        raise CannotRun("CUDA's headers are missing", hint=HINT)
    return headers


@functools.cache
def _nvrtc() -> Any:
    """cuda-bindings' NVRTC module, its library loaded."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        raise CannotRun("cuda-bindings is not installed", hint=HINT)
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as problem:
        raise CannotRun(f"NVRTC does not load: {problem}", hint=HINT) from None
    return nvrtc


def _checked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    """The value of a call that returned (status, value); RuntimeError if it failed."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(nvrtc.nvrtcGetErrorString(status)[1].decode())
    return values[0] if values else None
