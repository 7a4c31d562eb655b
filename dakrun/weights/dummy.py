"""Random weights in place of a checkpoint, generated on the device: --load-format dummy.

An element depends only on its tensor's name and its index, so every plan gives the same model.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch

from dakrun.models.decoder import Decoder
from dakrun.models.modules import Request, Source

STANDARD_DEVIATION = 0.02
COPY_ELEMENTS = 1 << 20  # generated at a time by Dummy.copy
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64 constants as signed integers


class Dummy:
    """A source of random weights with the interface of Checkpoint.

    Matrices are normally distributed, norm weights are 1 and biases 0.
    """

    def check(self, model: Decoder) -> None:
        """Accept any model."""

    def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
        """Write `rows` of the tensor `source` to `out`, of any dtype and device."""
        step = max(1, COPY_ELEMENTS * len(out) // max(1, out.numel()))
        for start in range(0, len(out), step):
            some = out[start : start + step]
            first = rows.start + start
            some.copy_(_values(source, slice(first, first + len(some)), out.device))

    def stream(
        self, requests: Sequence[Request], device: torch.device
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the rows of each request as float32 tensors on `device`."""
        for request in requests:
            yield [_values(source, rows, device) for source, rows in request]


def _values(source: Source, rows: slice, device: torch.device) -> torch.Tensor:
    """`rows` of the tensor `source` as float32 [rows, K], or [rows] for norms and biases."""
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
    uniform = bits.bitwise_and_(2**23 - 1).float().add_(0.5).mul_(2**-22).sub_(1)  # in (-1, 1)
    return uniform.erfinv_().mul_(STANDARD_DEVIATION * 2**0.5).view(-1, cols)
