"""Copies between memory tiers by a GPU's copy engine, on a stream beside torch's current one.

On a CPU, where all tiers are its own memory, a copy is made when it is asked for.
"""

import torch


class CopyStream:
    """Copies that go in their own order, beside what is launched on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """Let copies that are started next wait for what is launched."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Let what is launched next wait for the copies that are started."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def copied(self) -> torch.cuda.Event | None:
        """What passes when the copies that are started have ended; None where they have."""
        return None if self._stream is None else self._stream.record_event()

    def copy(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Start copying as `copy` does, pair by pair."""
        with torch.cuda.stream(self._stream):
            for to, of in pairs:
                copy(to, of)


def copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Start copying `of` into `to`, in the order of torch's current stream.

    They are of one shape and dtype, in any two tiers, and contiguous, or of two dimensions and
    contiguous in the last. It is the current GPU that copies, also from and to a peer's memory,
    where torch would have the peer do it. Host memory must be page-locked.
    Raises ValueError where the tensors are not alike.
    """
    rows = [x.view(1, -1) if x.is_contiguous() else x for x in (to, of)]
    if to.shape != of.shape or to.dtype != of.dtype or any(_scattered(x) for x in rows):
        raise ValueError(
            "expected tensors of one shape and dtype, of rows each in one piece, got "
            f"{list(to.shape)} of {to.dtype} and {list(of.shape)} of {of.dtype}"
        )
    if not torch.cuda.is_available():
        to.copy_(of)
        return
    from cupy.cuda import runtime

    stream = torch.cuda.current_stream().cuda_stream
    pointers, kind = (to.data_ptr(), of.data_ptr()), runtime.memcpyDefault
    if all(len(x) == 1 for x in rows):
        runtime.memcpyAsync(*pointers, of.nbytes, kind, stream)
        return
    height, size = len(of), of.element_size()
    steps = [x.stride(0) * size for x in (to, of)]
    runtime.memcpy2DAsync(
        pointers[0], steps[0], pointers[1], steps[1], of.nbytes // height, height, kind, stream
    )


def _scattered(rows: torch.Tensor) -> bool:
    return rows.dim() != 2 or rows.stride(1) != 1
