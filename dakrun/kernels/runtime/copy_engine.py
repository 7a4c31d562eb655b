"""Copies between memory tiers by a GPU's copy engine, on a stream of their own.

On a CPU, where all tiers are its own memory, a copy is complete when the call returns.
"""

import torch


class CopyStream:
    """A stream of copies that runs concurrently with torch's current stream on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """Make later copies wait for the work already launched on torch's current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Make later launches on torch's current stream wait for the copies already started."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def copied(self) -> torch.cuda.Event | None:
        """Event that completes with the copies already started; None on a CPU: they are done."""
        return None if self._stream is None else self._stream.record_event()

    def copy(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Start copies of (destination, source) pairs, as the function `copy` does."""
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                copy(destination, source)


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Start copying `source` to `destination` on torch's current stream.

    Both have one shape and dtype, lie in any tiers, and are contiguous, or 2-D with contiguous
    rows. The current GPU's copy engine does the work, also to and from a peer's memory, where torch
    would use the peer's. Host memory must be page-locked.
    Raises ValueError if shape, dtype or strides do not fit.
    """
    rows = [x.view(1, -1) if x.is_contiguous() else x for x in (destination, source)]
    if (
        destination.shape != source.shape
        or destination.dtype != source.dtype
        or any(_scattered(x) for x in rows)
    ):
        raise ValueError(
            "expected tensors of one shape and dtype with contiguous rows, got "
            f"{list(destination.shape)} of {destination.dtype} and {list(source.shape)} of "
            f"{source.dtype}"
        )
    if not torch.cuda.is_available():
        destination.copy_(source)
        return
    from cupy.cuda import runtime

    stream = torch.cuda.current_stream().cuda_stream
    pointers, kind = (destination.data_ptr(), source.data_ptr()), runtime.memcpyDefault
    if all(len(x) == 1 for x in rows):
        runtime.memcpyAsync(*pointers, source.nbytes, kind, stream)
        return
    height, size = len(source), source.element_size()
    pitches = [x.stride(0) * size for x in (destination, source)]
    runtime.memcpy2DAsync(
        pointers[0],
        pitches[0],
        pointers[1],
        pitches[1],
        source.nbytes // height,
        height,
        kind,
        stream,
    )


def _scattered(rows: torch.Tensor) -> bool:
    return rows.dim() != 2 or rows.stride(1) != 1
