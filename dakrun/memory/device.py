"""GPU memory: blocks of it, free bytes, peer access, views of host memory for kernels.

Knows CUDA device numbers and bytes, not the contents of the memory.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dakrun.errors import CannotRun, OutOfGpuMemory
from dakrun.units import format_bytes, parse_bytes

PEER_PREFIX = "peer:"
PEER_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
PEER_RESERVE = 64 << 20  # free bytes of a peer left for alignment and page granularity


class DeviceBlock:
    """`nbytes` of uninitialised GPU memory as the uint8 `tensor`.

    The memory is freed once `close` was called and no view of the tensor is left.
    """

    def __init__(self, nbytes: int, device: torch.device, *, hint: str) -> None:
        """Allocate. Raises OutOfGpuMemory with `hint`."""
        self._device = device
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as problem:
            raise out_of_memory(problem, hint=hint) from None

    def close(self) -> None:
        """Free the memory. A second call does nothing."""
        if self.tensor.numel():
            self.tensor = self.tensor.new_empty(0)
            # Return the bytes from torch's cache to the driver. Fails in a broken CUDA context.
            with suppress(RuntimeError), torch.cuda.device(self._device):
                torch.cuda.empty_cache()


def is_out_of_memory(problem: RuntimeError) -> bool:
    """Whether an error of torch, CuPy or the driver says that a GPU's memory ran out."""
    text = str(problem).lower()
    return isinstance(problem, torch.OutOfMemoryError) or (
        "cuda" in text and bool(re.search("out.of.memory", text))
    )


def out_of_memory(problem: RuntimeError, *, hint: str) -> OutOfGpuMemory:
    """The error for `problem`, with the missing bytes if its text names them, as torch's does."""
    sizes = []
    for pattern in (r"allocate ([\d.]+) (\w+)", r"([\d.]+) (\w+) is free"):
        found = re.search(pattern, str(problem))
        sizes.append(parse_bytes(found[1] + found[2].replace("bytes", "B")) if found else 0)
    missing = max(0, sizes[0] - sizes[1])
    by = f" by {format_bytes(missing)}" if missing else ""
    return OutOfGpuMemory(f"the GPU's memory ran out{by}", hint=hint, missing=missing)


def device_index(device: torch.device) -> int:
    """CUDA device number of `device`; the current device if it has no index."""
    return torch.cuda.current_device() if device.index is None else device.index


def peer_index(tier: str) -> int:
    """CUDA device number in the name of a peer tier: 1 for "peer:1".

    Raises CannotRun for any other name.
    """
    number = tier.removeprefix(PEER_PREFIX)
    if not tier.startswith(PEER_PREFIX) or not number.isdecimal():
        raise CannotRun(
            f"no tier is called {tier!r}",
            hint="remote tiers are host and peer:N, where N is the number of another GPU",
        )
    return int(number)


def check_peer(peer: int, device: int) -> None:
    """Raise CannotRun unless CUDA device `device` can read the memory of device `peer`."""
    count = torch.cuda.device_count()
    if peer >= count:
        raise CannotRun(
            f"tier peer:{peer} needs GPU {peer}, but only {count} "
            f"GPU{'s are' if count > 1 else ' is'} visible",
            hint="use --remote host, or check CUDA_VISIBLE_DEVICES; see: dakrun doctor",
        )
    if peer == device:
        raise CannotRun(
            f"tier peer:{peer} is the GPU that runs the model",
            hint="name another GPU as the peer, or reorder GPUs with CUDA_VISIBLE_DEVICES",
        )
    if not torch.cuda.can_device_access_peer(device, peer):
        raise CannotRun(
            f"GPU {device} cannot read the memory of GPU {peer}",
            hint="use --remote host; GPUs joined by NVLink can read each other (nvidia-smi topo)",
        )


def free_bytes(device: int) -> int:
    """Bytes of GPU `device` that can be allocated, torch's unused cache included."""
    free = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_on_peers(tiers: Iterable[str], device: torch.device) -> int | None:
    """Bytes that a plan may put on each peer GPU among `tiers`; None without peers.

    Raises CannotRun if `device` cannot read the memory of one of them.
    """
    peers = [peer_index(tier) for tier in tiers if tier.startswith(PEER_PREFIX)]
    for peer in peers:
        check_peer(peer, device_index(device))
    least = min(map(free_bytes, peers), default=None)
    return None if least is None else max(0, least - PEER_RESERVE)


def check_free(nbytes: int, device: int, *, what: str, hint: str) -> None:
    """Raise OutOfGpuMemory unless `nbytes` are free on `device`; `what` will use them."""
    if nbytes and nbytes > (free := free_bytes(device)):
        raise OutOfGpuMemory(
            f"{what} needs {format_bytes(nbytes)} of GPU {device}, "
            f"but only {format_bytes(free)} are free",
            hint=hint,
            missing=nbytes - free,
        )


def enable_peer_access(peer: int, device: int) -> None:
    """Let kernels on `device` read the memory of `peer`. A second call does nothing.

    Raises CannotRun if CUDA denies the access.
    """
    runtime = cuda_runtime()
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # creates torch's context on `device`
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as problem:
            if problem.status != PEER_ALREADY_ENABLED:
                raise CannotRun(
                    f"peer access from GPU {device} to GPU {peer} is denied ({problem})",
                    hint="use --remote host",
                ) from None


def cuda_runtime() -> Any:
    """CuPy's binding of the CUDA runtime. Raises CannotRun if CuPy is missing."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        raise CannotRun("CuPy is not installed", hint="pip install 'dakrun[cuda13]'") from None
    return runtime


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, started without waiting for the GPU; `tensor` itself if it is there.

    It is complete once an event recorded after it has passed.
    """
    if not tensor.is_cuda:
        return tensor
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return kept.copy_(tensor, non_blocking=True)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` in the order of its stream; the CPU does not wait."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def in_order(other: torch.device, device: torch.device) -> Iterator[None]:
    """Order torch's ops on GPU `other` between work launched on `device` before and after.

    torch runs an op on the GPU of its tensors, on that GPU's current stream, which knows nothing of
    kernels on `device` that write the same memory through the link. Does nothing on one device.
    """
    if other == device or other.type != "cuda":
        yield
        return
    streams = torch.cuda.current_stream(other), torch.cuda.current_stream(device)
    streams[0].wait_stream(streams[1])
    try:
        yield
    finally:
        streams[1].wait_stream(streams[0])


class _CudaArray:
    """The memory of a uint8 host tensor as a `__cuda_array_interface__`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # keeps the memory alive
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def device_view(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """View page-locked host memory as a tensor of `device`; kernels access it over the link.

    `tensor` is contiguous uint8. A GPU tensor is returned as it is, and so is any tensor if
    `device` is a CPU.
    """
    if device.type == "cpu" or tensor.is_cuda or not tensor.numel():
        return tensor
    return torch.as_tensor(_CudaArray(tensor), device=device).view(tensor.shape)
