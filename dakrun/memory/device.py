"""GPU memory: what is free on a device, which peers it can read, and blocks of either.

Knows CUDA device numbers and bytes; says before anything is taken what cannot be had.
"""

from collections.abc import Iterable
from contextlib import suppress

import torch

from dakrun.errors import CannotRun
from dakrun.units import format_bytes

PEER_PREFIX = "peer:"
PEER_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
PEER_RESERVE = 64 << 20  # of a peer's free memory: what alignment and whole pages take


class DeviceBlock:
    """`nbytes` of a GPU's memory, uninitialised, as the uint8 `tensor`.

    `close` gives it back; what views it keeps it until it goes, too.
    """

    def __init__(self, nbytes: int, device: torch.device, *, hint: str) -> None:
        """Raises CannotRun with `hint` where the GPU does not give it."""
        self._device = device
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            raise CannotRun(
                f"{device} does not give {format_bytes(nbytes)} of its memory", hint=hint
            ) from None

    def close(self) -> None:
        """Let go of the memory. Repeating it does nothing."""
        if self.tensor.numel():
            self.tensor = self.tensor.new_empty(0)
            # Else torch keeps it from other programs. A broken context keeps it anyway.
            with suppress(RuntimeError), torch.cuda.device(self._device):
                torch.cuda.empty_cache()


def device_index(device: torch.device) -> int:
    """The CUDA device number of `device`; that of the current one where it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def peer_index(tier: str) -> int:
    """The CUDA device number of a peer tier called "peer:1" and the like.

    Raises CannotRun where the name is another.
    """
    number = tier.removeprefix(PEER_PREFIX)
    if not tier.startswith(PEER_PREFIX) or not number.isdecimal():
        raise CannotRun(
            f"tier {tier!r} is none that a GPU can read",
            hint="a profile's remote tiers are host and peer:N, N the number of another GPU",
        )
    return int(number)


def check_peer(peer: int, device: int) -> None:
    """CannotRun unless CUDA device `device` can read the memory of device `peer`."""
    count = torch.cuda.device_count()
    if peer >= count:
        raise CannotRun(
            f"tier peer:{peer} needs GPU {peer}, and {count} GPU{'s are' if count > 1 else ' is'} "
            "visible",
            hint="use --remote host, or check CUDA_VISIBLE_DEVICES; see: dakrun doctor",
        )
    if peer == device:
        raise CannotRun(
            f"tier peer:{peer} is the GPU that computes",
            hint="name another GPU as the peer, or reorder them with CUDA_VISIBLE_DEVICES",
        )
    if not torch.cuda.can_device_access_peer(device, peer):
        raise CannotRun(
            f"GPU {device} cannot read the memory of GPU {peer}",
            hint="use --remote host; GPUs joined by NVLink can read each other (nvidia-smi topo)",
        )


def free_bytes(device: int) -> int:
    """Bytes of GPU `device` that can be had: those that are free, and those torch keeps unused."""
    free = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_on_peers(tiers: Iterable[str], device: torch.device) -> int | None:
    """Bytes that a plan may put on each of the peers among `tiers`; None where there is none.

    CannotRun where `device` cannot read the memory of one of them.
    """
    peers = [peer_index(tier) for tier in tiers if tier.startswith(PEER_PREFIX)]
    for peer in peers:
        check_peer(peer, device_index(device))
    least = min(map(free_bytes, peers), default=None)
    return None if least is None else max(0, least - PEER_RESERVE)


def check_free(nbytes: int, device: int, *, what: str, hint: str) -> None:
    """CannotRun with `hint` unless `device` has `nbytes` free, what torch keeps unused included."""
    if nbytes and nbytes > (free := free_bytes(device)):
        raise CannotRun(
            f"{what} needs {format_bytes(nbytes)} of GPU {device}, {format_bytes(free)} are free",
            hint=hint,
        )


def enable_peer_access(peer: int, device: int) -> None:
    """Let kernels on `device` read the memory of `peer`; doing so twice is no error."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        raise CannotRun("CuPy is not installed", hint="pip install 'dakrun[cuda13]'") from None
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # torch makes its context when it is first used
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as problem:
            if problem.status != PEER_ALREADY_ENABLED:
                raise CannotRun(
                    f"GPU {device} is not let read the memory of GPU {peer} ({problem})",
                    hint="use --remote host",
                ) from None


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, of the CPU, on `device` in stream order: the CPU does not wait for the copy."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class _Pointer:
    """A tensor's memory under the interface by which CUDA libraries hand arrays on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # keeps the memory
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def device_view(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, contiguous uint8 that `device` can address, as a tensor that its kernels take.

    Page-locked host memory so is read and written over the link where it lies. What is on a GPU
    already is returned as it is, and so is everything where `device` is a CPU.
    """
    if device.type == "cpu" or tensor.is_cuda or not tensor.numel():
        return tensor
    return torch.as_tensor(_Pointer(tensor), device=device).view(tensor.shape)
