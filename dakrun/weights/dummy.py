"""Random weights instead of a checkpoint, generated on the device: --load-format dummy.

An element depends only on its tensor's name and its index, so every plan gives the same model.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch

from dakrun.models.decoder import Decoder
from dakrun.models.experts import routers
from dakrun.models.operands import Request, Source
from dakrun.units import ceil_div
from dakrun.weights.parts import Decoded
from dakrun.weights.random_routers import router_bias

STANDARD_DEVIATION = 0.02
_CODE_SIZES = {"int4": 4.6, "int8": 74.0, "e2m1": 2.9, "e4m3": 32.0}  # deviations of codes
COPY_ELEMENTS = 1 << 20  # generated at a time by Dummy.copy
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64 constants as signed integers


class Dummy:
    """A source of random weights with the interface of Checkpoint.

    Matrices are normally distributed, norm weights are 1 and biases 0. Codes of a quantized matrix
    are uniformly distributed, those of e4m3 normally; all of its scales are the same. Routers of
    experts whose popularity is given have biases with which tokens choose as it says.
    """

    def __init__(self) -> None:
        self._biases: dict[str, torch.Tensor] = {}  # by the tensor's name

    def check(self, model: Decoder) -> None:
        """Accept any model."""
        mixture = model.config.mixture
        if mixture is None or mixture.choices is None:
            return
        deviation = STANDARD_DEVIATION * model.config.hidden_size**0.5  # of logits, after RMSNorms
        for number, router in enumerate(routers(model)):
            if router.bias:
                bias = router_bias(mixture.choices, number, router.routing, deviation)
                self._biases[router.bias.sources[0].name] = bias

    def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
        """Write `rows` of the tensor `source` to `out`, of any dtype and device."""
        step = max(1, COPY_ELEMENTS * len(out) // max(1, out.numel()))
        for start in range(0, len(out), step):
            some = out[start : start + step]
            first = rows.start + start
            of = slice(first, first + len(some))
            bias = self._biases.get(source.name)
            some.copy_(_values(source, of, out.device) if bias is None else bias[of])

    def stream(self, requests: Sequence[Request], device: torch.device) -> Iterator[list[Decoded]]:
        """Yield the rows of each request on `device`: float32, or codes with scales."""
        for request in requests:
            yield [
                _quantised(source, rows, device)
                if source.stored
                else (_values(source, rows, device),)
                for source, rows in request
            ]


def _quantised(source: Source, rows: slice, device: torch.device) -> Decoded:
    """`rows` of a quantized source, as its layout writes them."""
    layout, count = source.layout, rows.stop - rows.start
    assert source.stored and layout
    size = _CODE_SIZES[layout.code]
    if layout.code == "e4m3":
        values = _values(source, rows, device) * (size / STANDARD_DEVIATION)
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        # As many above zero as below: with another mean activations would leave float16's range.
        codes = (
            _bits(source, rows, device).remainder_((1 << layout.bits) - 1).add_(1).to(torch.uint8)
        )
    codes, groups = codes.view(count, -1), ceil_div(source.shape[1], layout.group)

    def all_of(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count, groups), value, dtype=dtype, device=device)

    if layout.scale_bytes == 1:
        factors = torch.full((count,), STANDARD_DEVIATION / size, device=device)
        return codes, all_of(1.0, torch.float8_e4m3fn), factors
    scales = all_of(STANDARD_DEVIATION / size, getattr(torch, source.stored.scale_dtype))
    if not layout.zeros:
        return codes, scales
    return codes, scales, all_of(1 << (layout.bits - 1), torch.int16)


def _values(source: Source, rows: slice, device: torch.device) -> torch.Tensor:
    """`rows` of the tensor `source` as float32 [rows, K], or [rows] for norms and biases."""
    name, (_, *shape) = source.name, source.shape
    if not shape:
        return torch.full(
            (rows.stop - rows.start,), float(not name.endswith("bias")), device=device
        )
    bits = _bits(source, rows, device)
    uniform = bits.bitwise_and_(2**23 - 1).float().add_(0.5).mul_(2**-22).sub_(1)  # in (-1, 1)
    return uniform.erfinv_().mul_(STANDARD_DEVIATION * 2**0.5).view(-1, shape[0])


def _bits(source: Source, rows: slice, device: torch.device) -> torch.Tensor:
    """Random int64 numbers for the elements of `rows`."""
    name, cols = source.name, source.shape[1]
    bits = torch.arange(rows.start * cols, rows.stop * cols, device=device)
    bits += (zlib.crc32(name.encode()) >> 1) << 32
    bits ^= bits >> 30
    bits *= _FACTORS[0]
    bits ^= bits >> 27
    bits *= _FACTORS[1]
    bits ^= bits >> 31
    return bits
