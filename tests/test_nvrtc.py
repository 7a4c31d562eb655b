"""Kernels compile for every architecture without a GPU; the cubin cache; error messages."""

import functools
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cases import cases
from compiled import kept

from dakrun.errors import CannotRun
from dakrun.formats import Quantised
from dakrun.geometry import CUDA_CONSTANTS, FEW_ROWS, SPLITK_THREADS
from dakrun.hardware import BARRIER_BYTES
from dakrun.kernels import all_variants
from dakrun.kernels.attention import cta_threads
from dakrun.kernels.attention import splitk as attention
from dakrun.kernels.runtime import (
    ARCHITECTURES,
    DTYPES,
    Compiled,
    CompileError,
    architecture,
    cached_cubin,
    compile_ahead,
    compile_cubin,
    compiling,
    jit,
    nvrtc,
)
from dakrun.kernels.runtime.nvrtc import source_digest
from dakrun.resources import resource_dir
from dakrun.units import ceil_div

CLUSTER_WORDS = {"shared::cluster", "multicast", "mapa"}  # in PTX
TILES = ("TILES", "GROUP_TILES")  # macros
WITH_RINGS = (
    "grouped_splitk.cu",
    "grouped_tiled.cu",
    "prompt_attn.cu",
    "splitk_flash_attn.cu",
    "splitk_gemm.cu",
    "tiled_gemm.cu",
)


def tiles_of(defines: dict[str, int]) -> int:
    """The tiles of a kernel that has variants with more or fewer."""
    return sum(defines.get(name, 0) for name in TILES)


def but_for_tiles(defines: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in defines.items() if name not in TILES)


def variants() -> list[Any]:
    """All kernels: make test compiles those in bfloat16 of a Hopper GPU, of one head size.

    Of those that differ in their tiles alone it compiles the largest, which needs most registers,
    and of a product with elements of 16 bits the smallest, too. For 12.0 it compiles one kernel of
    each source; make test-more the rest. For 10.0 and 12.1 only kernels in bfloat16 are compiled:
    they are those of 12.0 but for a few instructions.
    """

    def few(source: str, defines: dict[str, int], arch: str) -> bool:
        if arch != "sm_90a":
            return arch == "sm_120a" and defines == others[arch, source]
        if defines.get("BFLOAT16", 1) != 1 or defines.get("HEAD_DIM", 128) != 128:
            return False
        of_all, own = tiles[arch, source, but_for_tiles(defines)], tiles_of(defines)
        return own == max(of_all) or (
            own == min(of_all) and "TILES" in defines and "CODE" not in defines
        )

    every = [
        (*variant, arch)
        for arch in ARCHITECTURES
        for variant in all_variants(arch)
        if arch in ("sm_90a", "sm_120a") or variant[1].get("BFLOAT16", 1) == 1
    ]
    others = {(arch, source): defines for source, defines, arch in every}
    tiles = defaultdict[Any, set[int]](set)
    for source, defines, arch in every:
        tiles[arch, source, but_for_tiles(defines)].add(tiles_of(defines))
    return cases(every, few)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_source_is_compiled(arch: str) -> None:
    sources = {path.name for path in resource_dir("native").glob("*.cu")}
    assert {source for source, _ in all_variants(arch)} == sources


def compiled(source: str, arch: str, defines: dict[str, int]) -> Compiled:
    """A kernel of this package, compiled once."""
    return _compiled(source, arch, tuple(defines.items()))


@functools.cache
def _compiled(source: str, arch: str, macros: tuple[tuple[str, int], ...]) -> Compiled:
    def compile_it() -> bytes:
        return pickle.dumps(compile_cubin(source, arch, dict(macros)))

    digest = source_digest(source, arch, dict(macros))
    return cast(Compiled, pickle.loads(kept(["nvrtc", digest], compile_it)))


@pytest.mark.parametrize(("source", "defines", "arch"), variants())
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
        if source in WITH_RINGS:
            assert kernel.shared_bytes <= BARRIER_BYTES, "rings have the rest"
    assert found.warnings == ()


@pytest.mark.parametrize(
    "arch", cases([(arch,) for arch in ARCHITECTURES], lambda arch: arch in ("sm_90a", "sm_120a"))
)
def test_only_cards_with_clusters_multicast(arch: str) -> None:
    """Elsewhere no copy has an address of a cluster either (native/hardware.cuh)."""
    last = dict(all_variants(arch))
    words = {
        word
        for source, defines in last.items()
        for word in re.findall(r"shared::\w+|multicast|mapa", compiled(source, arch, defines).ptx)
    }
    clusters = arch in ("sm_90a", "sm_100a")
    assert words == {"shared::cta", *(CLUSTER_WORDS if clusters else ())}


@pytest.mark.parametrize(
    "dtype", cases([(dtype,) for dtype in DTYPES], lambda dtype: dtype == torch.bfloat16)
)
def test_an_sm_has_room_for_launches_that_follow_each_other(dtype: torch.dtype) -> None:
    """Two CTAs of a decode step's kernels fit on an SM: else CTAs are placed unevenly.

    An SM has four register files, to which warps are assigned; a warp gets registers in 256s.
    Some products with elements of 4 and 8 bits need more (kUnbounded of splitk_gemm.cu), of the
    formats here those of 9 to 16 rows that mix tiers: attention waits, and gets free SMs twice.
    """

    def of_warp(source: str, defines: dict[str, int]) -> int:
        (found,) = compiled(source, "sm_90a", defines).kernels
        return 256 * ceil_div(32 * found.registers, 256)

    products = [
        macros
        for source, macros in all_variants("sm_90a")
        if source == "splitk_gemm.cu"
        and macros["BFLOAT16"] == (dtype == torch.bfloat16)
        and 8 * macros["TILES"] <= FEW_ROWS
        and not ("CODE" in macros and macros["MIXES"] and macros["TILES"] > 1)
    ]
    awq, nvfp4 = Quantised("int4", 128, 2, zeros=True), Quantised("e2m1", 16, 1)
    plain = [macros for macros in products if "CODE" not in macros and not macros["NORM"]]
    products += [
        {**macros, **stored.macros}
        for macros in plain
        for stored in (awq, nvfp4)
        if macros["TILES"] == 1 or (macros["TILES"] == 2 and not macros["MIXES"])
    ]
    assert sum("CODE" in macros for macros in products) == 12
    product = max(of_warp("splitk_gemm.cu", defines) for defines in products)
    attends = of_warp(attention.SOURCE, attention.defines(dtype, 128, 1))
    warps, beside = SPLITK_THREADS // 32, cta_threads(1) // 32
    assert ceil_div(warps, 4) * product + beside // 4 * attends <= 64 * 1024 // 4
    assert 2 * warps // 4 * product <= 64 * 1024 // 4


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of native/, and an empty cache."""
    folder = tmp_path / "native"
    folder.mkdir()
    monkeypatch.setattr(nvrtc, "resource_dir", lambda _: folder)
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(tmp_path / "cache"))
    return folder


GOOD = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }\n'


def test_a_failed_compile_shows_the_message_and_the_options(native: Path) -> None:
    (native / "bad.cu").write_text("__global__ void k() { nonsense; }\n")
    with pytest.raises(CompileError) as caught:
        compile_cubin("bad.cu", "sm_90a", {"FACTOR": 3})
    assert "bad.cu" in str(caught.value) and '"nonsense" is undefined' in str(caught.value)
    for option in ("-arch=sm_90a", "-DFACTOR=3", f"-DMAX_TIERS={CUDA_CONSTANTS['MAX_TIERS']}"):
        assert option in caught.value.hint
    assert "bad.cu(1)" in caught.value.log


def test_spills_are_reported(native: Path) -> None:
    loads = "".join(f"float v{i} = x[{i} * n]; " for i in range(300))
    stores = "".join(f"x[{i} * n + 1] = v{i} * v{(i * 7) % 300}; " for i in range(300))
    (native / "many.cu").write_text(
        f'extern "C" __global__ void __launch_bounds__(1024) k(float* x, int n) '
        f"{{ {loads} __syncthreads(); {stores} }}\n"
    )
    compiled = compile_cubin("many.cu", "sm_90a")
    assert compiled.kernels[0].spills and compiled.warnings


def test_the_cache_is_keyed_by_everything_that_decides_the_cubin(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (native / "a.cuh").write_text('#include "b.cuh"\n')
    (native / "b.cuh").write_text("#define UNUSED 1\n")
    (native / "k.cu").write_text('#include "a.cuh"\n' + GOOD)

    def path(arch: str = "sm_90a", factor: int = 2) -> Path:
        return cached_cubin("k.cu", arch, {"FACTOR": factor})

    first = path()
    assert first.is_file() and path() == first
    found = {first, path(factor=3), path("sm_120a")}
    (native / "b.cuh").write_text("#define UNUSED 2\n")
    found.add(path())
    (native / "k.cu").write_text('#include "a.cuh"\n\n' + GOOD)
    found.add(path())
    # A shared constant has another value: there is no public way to change one.
    monkeypatch.setattr(nvrtc, "CUDA_CONSTANTS", CUDA_CONSTANTS | {"MAX_TIERS": 3})
    found.add(path())
    assert len(found) == 6


def test_a_cached_cubin_is_not_compiled_again(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (native / "k.cu").write_text(GOOD)
    path = cached_cubin("k.cu", "sm_90a", {"FACTOR": 2})
    monkeypatch.setattr(jit, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert cached_cubin("k.cu", "sm_90a", {"FACTOR": 2}) == path


def test_compiling_ahead(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (native / "k.cu").write_text(GOOD)
    variants = [("k.cu", {"FACTOR": factor}) for factor in range(6)]
    compile_ahead(variants, "sm_90a")
    monkeypatch.setattr(jit, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    for source, defines in variants:
        assert cached_cubin(source, "sm_90a", defines).is_file()


def test_a_failure_cancels_variants_not_yet_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def slow(source: str, *_: object) -> None:
        begun.append(source)
        time.sleep(0.05)

    monkeypatch.setattr(jit, "cached_cubin", slow)
    variants: list[tuple[str, dict[str, int]]] = [(f"{number}.cu", {}) for number in range(500)]
    with pytest.raises(CannotRun), compiling(variants, "sm_90a"):
        raise CannotRun("there is no such file", hint="give another")
    assert len(begun) < 100
    begun.clear()
    with compiling(variants[:8], "sm_90a") as wait:
        wait()
        assert len(begun) == 8


def test_a_failed_compilation_ahead_is_reported(native: Path) -> None:
    (native / "bad.cu").write_text("__global__ void k() { nonsense; }\n")
    with pytest.raises(CompileError):
        compile_ahead([("bad.cu", {})], "sm_90a")


def test_racing_for_a_cubin_leaves_one_whole_file(native: Path) -> None:
    (native / "k.cu").write_text(GOOD)
    paths: list[Path] = []

    def race() -> None:
        paths.append(cached_cubin("k.cu", "sm_90a", {"FACTOR": 2}))

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
        "from dakrun.kernels.runtime import cached_cubin\n"
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
    ("capability", "arch"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a"), ((12, 1), "sm_121a")],
)
def test_architectures(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert architecture(0) == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 3)])
def test_a_gpu_without_kernels(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    with pytest.raises(CannotRun) as caught:
        architecture(0)
    assert "NVIDIA X" in str(caught.value) and "{}.{}".format(*capability) in str(caught.value)
    assert "H200" in caught.value.hint


def test_a_cache_that_cannot_be_written(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (native / "k.cu").write_text(GOOD)
    (native / "file").write_text("")
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(native / "file"))
    with pytest.raises(CannotRun) as caught:
        cached_cubin("k.cu", "sm_90a", {"FACTOR": 2})
    assert "DAKRUN_CACHE_DIR" in caught.value.hint
