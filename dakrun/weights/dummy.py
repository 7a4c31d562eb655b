"""Random weights in place of a checkpoint's, made where they are wanted: --load-format dummy.

A number depends on its tensor's name and its place in it alone, so models are the same whatever
their plan is.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch

from dakrun.weights.checkpoint import Manifest, Request, Source

DEVIATION = 0.02
COPY_ELEMENTS = 1 << 20
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64, as signed numbers


class Dummy:
    """What a Checkpoint is to the loader.

    Matrices are of normal numbers, weights of norms are 1 and biases 0.
    """

    def __contains__(self, name: str) -> bool:
        return True

    def check(self, manifest: Manifest) -> None:
        """Nothing can be wrong."""

    def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
        """Make rows of a tensor in `out`, of any dtype and device."""
        step = max(1, COPY_ELEMENTS * len(out) // max(1, out.numel()))
        for start in range(0, len(out), step):
            some = out[start : start + step]
            first = rows.start + start
            some.copy_(_values(source, slice(first, first + len(some)), out.device))

    def stream(
        self, requests: Sequence[Request], device: torch.device
    ) -> Iterator[list[torch.Tensor]]:
        """The rows of each request, float32, on `device`."""
        for request in requests:
            yield [_values(source, rows, device) for source, rows in request]


def _values(source: Source, rows: slice, device: torch.device) -> torch.Tensor:
    """Rows of a tensor, float32."""
    name, (_, *shape) = source
    if not shape:
        return torch.full(
            (rows.stop - rows.start,), float(not name.endswith("bias")), device=device
        )
    cols = shape[0]
    bits = torch.arange(rows.start * cols, rows.stop * cols, device=device)
    bits += (zlib.crc32(name.encode()) >> 1) << 32
    bits ^= bits >> 30
    bits *= _FACTORS[0]
    bits ^= bits >> 27
    bits *= _FACTORS[1]
    bits ^= bits >> 31
    uniform = bits.bitwise_and_(2**23 - 1).float().add_(0.5).mul_(2**-22).sub_(1)  # from -1 to 1
    return uniform.erfinv_().mul_(DEVIATION * 2**0.5).view(-1, cols)
