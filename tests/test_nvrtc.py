"""Kernels compile for every architecture without a GPU; the cubin cache; what failures say."""

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dakrun.errors import CannotRun
from dakrun.geometry import FEW_ROWS, HEAD_DIMS, SPLITK_THREADS, TILED_PORTABLE_X_TILES
from dakrun.kernels import embed, normalize, select_greedy, store_kv
from dakrun.kernels.attention import splitk as attention
from dakrun.kernels.attention.kv_blocks import DTYPES
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.runtime import jit, nvrtc, operands
from dakrun.kernels.runtime.nvrtc import ARCHITECTURES, Compiled, CompileError, compile_cubin
from dakrun.resources import resource_dir
from dakrun.units import ceil_div

SOURCES = sorted(path.name for path in resource_dir("native").glob("*.cu"))
GEMMS = [macros for dtype in DTYPES for macros in gemm.all_defines(dtype)]
ATTENTIONS = [
    attention.defines(dtype, head_dim, group)
    for dtype in DTYPES
    for head_dim in HEAD_DIMS
    for group in (8, 16)
]
PORTABLE_TILED_GEMMS = [
    tiled_gemm.defines(dtype, tiles) for dtype in DTYPES for tiles in TILED_PORTABLE_X_TILES
]
TILED_GEMMS = {
    "sm_90a": [macros for dtype in DTYPES for macros in tiled_gemm.all_defines(dtype)],
    "sm_100a": PORTABLE_TILED_GEMMS,
    "sm_120a": PORTABLE_TILED_GEMMS,
}
OF_DTYPE = [operands.defines(dtype) for dtype in DTYPES]
OF_SOURCE = {
    gemm.SOURCE: GEMMS,
    attention.SOURCE: ATTENTIONS,
    **{wrapper.SOURCE: OF_DTYPE for wrapper in (embed, normalize, select_greedy, store_kv)},
}
VARIANTS = [
    pytest.param(source, defines, arch, marks=[] if arch == "sm_90a" else pytest.mark.archs)
    for arch in ARCHITECTURES
    for source in SOURCES
    for defines in {**OF_SOURCE, tiled_gemm.SOURCE: TILED_GEMMS[arch]}.get(source, [{}])
]


def compiled(source: str, arch: str, defines: dict[str, int]) -> Compiled:
    """What the compiler makes of a kernel of this package, once."""
    return _compiled(source, arch, tuple(defines.items()))


@functools.cache
def _compiled(source: str, arch: str, macros: tuple[tuple[str, int], ...]) -> Compiled:
    return compile_cubin(source, arch, dict(macros))


@pytest.mark.parametrize(("source", "defines", "arch"), VARIANTS)
def test_every_kernel_compiles_without_spills_or_warnings(
    source: str, defines: dict[str, int], arch: str, kernel_reports: list[str]
) -> None:
    found = compiled(source, arch, defines)
    assert found.cubin.startswith(b"\x7fELF")
    assert found.kernels, found.log
    for kernel in found.kernels:
        kernel_reports.append(
            f"{source:<22} {arch:<8} {kernel.name:<16} {kernel.registers:>3} registers "
            f"{kernel.shared_bytes:>6} B static shared memory"
            + "".join(f"  {name}={value}" for name, value in defines.items())
        )
        assert not kernel.spills, kernel
    assert found.warnings == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_sm_has_room_for_launches_that_follow_each_other(dtype: torch.dtype) -> None:
    """CTAs of a decode step's kernels, two of any: else they come to SMs unevenly, and wait.

    An SM's registers are in four parts, which warps are dealt out to; a warp has them by 256.
    """

    def of_warp(source: str, defines: dict[str, int]) -> int:
        (found,) = compiled(source, "sm_90a", defines).kernels
        return 256 * ceil_div(32 * found.registers, 256)

    products = [some for some in gemm.all_defines(dtype) if 8 * some["X_TILES"] <= FEW_ROWS]
    product = max(of_warp(gemm.SOURCE, defines) for defines in products)
    attends = of_warp(attention.SOURCE, attention.defines(dtype, 128, 1))
    warps, beside = SPLITK_THREADS // 32, attention.cta_threads(1) // 32
    assert ceil_div(warps, 4) * product + beside // 4 * attends <= 64 * 1024 // 4
    assert 2 * warps // 4 * product <= 64 * 1024 // 4


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in the place of native/, and an empty cache."""
    folder = tmp_path / "native"
    folder.mkdir()
    monkeypatch.setattr(nvrtc, "resource_dir", lambda _: folder)
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(tmp_path / "cache"))
    nvrtc._include_options.cache_clear()
    yield folder
    nvrtc._include_options.cache_clear()


GOOD = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }\n'


def test_a_failed_compile_shows_the_message_and_the_options(native: Path) -> None:
    (native / "bad.cu").write_text("__global__ void k() { nonsense; }\n")
    with pytest.raises(CompileError) as caught:
        compile_cubin("bad.cu", "sm_90a", {"FACTOR": 3})
    assert "bad.cu" in str(caught.value) and '"nonsense" is undefined' in str(caught.value)
    assert "-arch=sm_90a" in caught.value.hint and "-DFACTOR=3" in caught.value.hint
    assert "bad.cu(1)" in caught.value.log


def test_spills_are_seen(native: Path) -> None:
    loads = "".join(f"float v{i} = x[{i} * n]; " for i in range(300))
    stores = "".join(f"x[{i} * n + 1] = v{i} * v{(i * 7) % 300}; " for i in range(300))
    (native / "many.cu").write_text(
        f'extern "C" __global__ void __launch_bounds__(1024) k(float* x, int n) '
        f"{{ {loads} __syncthreads(); {stores} }}\n"
    )
    compiled = compile_cubin("many.cu", "sm_90a")
    assert compiled.kernels[0].spills and compiled.warnings


def test_the_cache_is_keyed_by_all_that_decides_the_cubin(native: Path) -> None:
    (native / "a.cuh").write_text('#include "b.cuh"\n')
    (native / "b.cuh").write_text("#define UNUSED 1\n")
    (native / "k.cu").write_text('#include "a.cuh"\n' + GOOD)

    def path(arch: str = "sm_90a", factor: int = 2) -> Path:
        return jit.cached_cubin("k.cu", arch, {"FACTOR": factor})

    first = path()
    assert first.is_file() and path() == first
    found = {first, path(factor=3), path("sm_120a")}
    (native / "b.cuh").write_text("#define UNUSED 2\n")
    found.add(path())
    (native / "k.cu").write_text('#include "a.cuh"\n\n' + GOOD)
    found.add(path())
    assert len(found) == 5


def test_a_kept_cubin_is_not_compiled_again(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (native / "k.cu").write_text(GOOD)
    path = jit.cached_cubin("k.cu", "sm_90a", {"FACTOR": 2})
    monkeypatch.setattr(jit, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert jit.cached_cubin("k.cu", "sm_90a", {"FACTOR": 2}) == path


def test_compiling_ahead(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (native / "k.cu").write_text(GOOD)
    variants = [("k.cu", {"FACTOR": factor}) for factor in range(6)]
    jit.compile_ahead(variants, "sm_90a")
    monkeypatch.setattr(jit, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    for source, defines in variants:
        assert jit.cached_cubin(source, "sm_90a", defines).is_file()


def test_what_is_compiled_beside_a_failure_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def slow(source: str, *_: object) -> None:
        begun.append(source)
        time.sleep(0.05)

    monkeypatch.setattr(jit, "cached_cubin", slow)
    variants: list[tuple[str, dict[str, int]]] = [(f"{number}.cu", {}) for number in range(500)]
    with pytest.raises(CannotRun), jit.compiling(variants, "sm_90a"):
        raise CannotRun("there is no such file", hint="give another")
    assert len(begun) < 100
    begun.clear()
    with jit.compiling(variants[:8], "sm_90a") as wait:
        wait()
        assert len(begun) == 8


def test_what_fails_ahead_is_said(native: Path) -> None:
    (native / "bad.cu").write_text("__global__ void k() { nonsense; }\n")
    with pytest.raises(CompileError):
        jit.compile_ahead([("bad.cu", {})], "sm_90a")


def test_racing_for_a_cubin_leaves_one_whole_file(native: Path) -> None:
    (native / "k.cu").write_text(GOOD)
    paths: list[Path] = []

    def race() -> None:
        paths.append(jit.cached_cubin("k.cu", "sm_90a", {"FACTOR": 2}))

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 6 and len(set(paths)) == 1
    assert paths[0].read_bytes() == compile_cubin("k.cu", "sm_90a", {"FACTOR": 2}).cubin
    assert [path.name for path in paths[0].parent.iterdir()] == [paths[0].name]


def test_processes_racing_for_a_cubin_publish_it_whole(tmp_path: Path) -> None:
    code = (
        "from dakrun.kernels.runtime.jit import cached_cubin\n"
        "print(cached_cubin('bandwidth.cu', 'sm_90a'))\n"
    )
    env = {**os.environ, "DAKRUN_CACHE_DIR": str(tmp_path)}
    racers = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {racer.communicate(timeout=120)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    (path,) = (Path(line.strip()) for line in said)
    assert path.read_bytes() == compile_cubin("bandwidth.cu", "sm_90a").cubin
    assert list((tmp_path / "cubins").iterdir()) == [path]


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")]
)
def test_architectures(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert jit.architecture(0) == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 3)])
def test_a_gpu_without_kernels(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    with pytest.raises(nvrtc.CannotRun) as caught:
        jit.architecture(0)
    assert str(caught.value) == "NVIDIA X has compute capability {}.{}".format(*capability)
    assert "9.0 (H100, H200, GH200)" in caught.value.hint


def test_a_cache_that_cannot_be_written(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (native / "k.cu").write_text(GOOD)
    (native / "file").write_text("")
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(native / "file"))
    with pytest.raises(nvrtc.CannotRun) as caught:
        jit.cached_cubin("k.cu", "sm_90a", {"FACTOR": 2})
    assert "DAKRUN_CACHE_DIR" in caught.value.hint
