"""Loads and launches kernels of native/: cubin cache, CuPy modules, launches on torch's stream.

Knows nothing of what a kernel computes or where its operands lie.
"""

import contextlib
import ctypes
import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dakrun.errors import CannotRun
from dakrun.interrupt import Workers
from dakrun.kernels.runtime.held import held_card, held_macros
from dakrun.kernels.runtime.nvrtc import ARCHITECTURES, HINT, compile_cubin, source_digest
from dakrun.resources import cache_dir

MAX_ALIGNMENT = 64  # bytes, of a field of kernel arguments: TensorMap of native/ptx_words.cuh


class Kernel:
    """A kernel of a module loaded on one device.

    Its only parameter is a struct; callers pass a ctypes.Structure of the same layout.
    """

    def __init__(self, function: Any) -> None:
        self._function = function  # keeps the module alive
        self._handle = function.kernel.ptr

    def launch(
        self,
        grid: int,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        pdl: bool = False,
    ) -> None:
        """Launch `grid` CTAs of `block` threads on torch's current stream.

        `shared_bytes` is the dynamic shared memory of a CTA. Each `cluster` CTAs form a cluster; it
        divides the grid. With `pdl` (programmatic dependent launch) the kernel may start before its
        predecessor has ended, and must itself wait before it uses what that kernel writes.
        Raises ValueError for a wrong grid, RuntimeError if the driver refuses the launch, or if it
        claims more than the card has to which launches are held.
        """
        if grid < 1 or grid % cluster:
            raise ValueError(f"expected a positive multiple of {cluster} CTAs, got {grid}")
        self._check_held(shared_bytes, cluster)
        driver = _driver()
        self._allow(shared_bytes)
        config = _launch_config(driver, grid, block, shared_bytes)
        config.hStream = driver.CUstream(_current_stream())
        if attributes := _attributes(cluster, pdl):
            config.attrs, config.numAttrs = attributes, len(attributes)
        padded = _padded(args)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(padded))
        (status,) = driver.cuLaunchKernelEx(
            config, driver.CUfunction(self._handle), ctypes.addressof(pointers), 0
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"launch of {self._function.name} failed: {status.name} (grid {grid}, block "
                f"{block}, cluster {cluster}, {shared_bytes} bytes of shared memory)"
            )

    def clusters(self, size: int, block: int, shared_bytes: int) -> int:
        """Clusters of `size` CTAs that an otherwise idle GPU runs at a time."""
        driver = _driver()
        self._allow(shared_bytes)
        config = _launch_config(driver, size, block, shared_bytes)
        config.attrs, config.numAttrs = [_cluster_attribute(driver, size)], 1
        status, found = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(self._handle), config)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the occupancy of {self._function.name} is unknown: {status.name}")
        return int(found)

    def _check_held(self, shared_bytes: int, cluster: int) -> None:
        card = held_card()
        if card is None:
            return
        total = shared_bytes + self._function.shared_size_bytes
        if total > card.shared_bytes or cluster > card.max_cluster:
            raise RuntimeError(
                f"launch of {self._function.name} failed: {total} bytes of shared memory in "
                f"clusters of {cluster}, but launches are held to a card of compute capability "
                f"{card.capability} with {card.shared_bytes}, in clusters of {card.max_cluster}"
            )

    def _allow(self, shared_bytes: int) -> None:
        if shared_bytes > self._function.max_dynamic_shared_size_bytes:
            self._function.max_dynamic_shared_size_bytes = shared_bytes


def kernel(source: str, name: str, defines: Mapping[str, int] | None = None) -> Kernel:
    """Load the kernel `name` of native/`source` on torch's current device.

    `defines` are the macros of one variant; a card to which launches are held adds its own. The
    kernel is compiled unless its cubin is in the cache.
    Raises CannotRun if the GPU is not supported or the CUDA packages are missing.
    """
    device = torch.cuda.current_device()
    macros = {**(defines or {}), **held_macros()}
    return _kernel(source, name, tuple(sorted(macros.items())), device, _carveout(device))


@functools.cache
def _kernel(
    source: str, name: str, defines: tuple[tuple[str, int], ...], device: int, carveout: int | None
) -> Kernel:
    module = _module(source, defines, device)
    with _cupy().cuda.Device(device):
        function = module.get_function(name)
        if carveout is not None:
            function.preferred_shared_memory_carveout = carveout
        return Kernel(function)


def _carveout(device: int) -> int | None:
    """Percent of an SM's shared memory that the held card has; None where it is all of it.

    A hint to the driver, which takes the least size of an SM's shared memory that is enough.
    """
    if (card := held_card()) is None:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    whole = properties.shared_memory_per_multiprocessor
    return 100 * card.shared_bytes_per_sm // whole if card.shared_bytes_per_sm < whole else None


@functools.cache
def _module(source: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    path = cached_cubin(source, architecture(device), dict(defines))
    cupy = _cupy()
    with cupy.cuda.Device(device):
        return cupy.RawModule(path=str(path))


def architecture(device: int) -> str:
    """Compilation target, one of ARCHITECTURES, of `device`, a CUDA device index.

    Raises CannotRun for GPUs without a target.
    """
    major, minor = torch.cuda.get_device_capability(device)
    found = f"sm_{major}{minor}a"
    if found not in ARCHITECTURES:
        raise CannotRun(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}",
            hint="dakrun's kernels run on 9.0 (H100, H200, GH200), 10.0 (B200), 12.0 (RTX PRO 6000 "
            "Blackwell, RTX 5090) and 12.1 (DGX Spark)",
        )
    return found


def cached_cubin(source: str, arch: str, defines: Mapping[str, int] | None = None) -> Path:
    """Path of the variant's cubin in the cache, compiled first if it is missing.

    The file appears atomically; processes that race for it publish the same bytes.
    Raises CannotRun if the cache cannot be written.
    """
    digest = source_digest(source, arch, defines)
    folder = cache_dir() / "cubins"
    path = folder / f"{Path(source).stem}-{arch}-{digest[:24]}.cubin"
    if path.is_file():
        return path
    cubin = compile_cubin(source, arch, defines).cubin
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _publish(path, cubin)
    except OSError as problem:
        raise CannotRun(
            f"{folder}: {problem.strerror}", hint="set DAKRUN_CACHE_DIR to a writable folder"
        ) from None
    return path


def compile_ahead(variants: Iterable[tuple[str, Mapping[str, int]]], arch: str) -> None:
    """Compile the variants (source, defines) for `arch` into the cache, in parallel.

    NVRTC releases the GIL, so threads suffice.
    """
    with compiling(variants, arch):
        pass


@contextlib.contextmanager
def compiling(
    variants: Iterable[tuple[str, Mapping[str, int]]], arch: str
) -> Iterator[Callable[[], None]]:
    """Compile in the background; all cubins are ready on exit.

    Yields a function that waits for them. After an exception, variants not yet begun are cancelled.
    """
    with Workers() as pool:
        held = held_macros()
        cubins = [
            pool.submit(cached_cubin, source, arch, {**defines, **held})
            for source, defines in variants
        ]

        def wait() -> None:
            for cubin in cubins:
                cubin.result()

        yield wait
        wait()


def _publish(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _current_stream() -> int:
    """Handle of torch's current stream, without a Stream made of it, which takes 6 to 8 us."""
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


def _padded(args: ctypes.Structure) -> "ctypes.Array[ctypes.c_char]":
    """`args` with all bytes that the driver reads: as many as the struct has in C++.

    That is a multiple of the alignment of its fields, which ctypes does not know: with a tensor map
    64 bytes. Where the memory behind `args` is not mapped, reading it ends the process.
    """
    size = ctypes.sizeof(args)
    padded = ctypes.create_string_buffer(size + MAX_ALIGNMENT)
    ctypes.memmove(padded, ctypes.addressof(args), size)
    return padded


def _launch_config(driver: Any, grid: int, block: int, shared_bytes: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    return config


@functools.cache
def _attributes(cluster: int, pdl: bool) -> list[Any]:
    """Attributes of launches in clusters, and of launches with PDL."""
    driver = _driver()
    clusters = [_cluster_attribute(driver, cluster)] if cluster > 1 else []
    return clusters + ([_pdl_attribute(driver)] if pdl else [])


def _cluster_attribute(driver: Any, size: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = size, 1, 1
    return attribute


def _pdl_attribute(driver: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise CannotRun("CuPy is not installed", hint=HINT) from None
    return cupy
