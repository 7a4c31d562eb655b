"""Products of packed matrices and more rows of X than SplitK_GEMM is for.

Knows operands, no models: the tiled GEMM computes them where the GPU has wgmma, and elsewhere
torch does, from what is unpacked piece by piece.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dakrun.hardware import LOCAL
from dakrun.kernels.gemm import Activation
from dakrun.kernels.heuristics import FEW_ROWS, TierAccess
from dakrun.kernels.heuristics import MAX_ROWS as SPLITK_ROWS
from dakrun.kernels.packing import OCTET_ROWS, PackedTensor
from dakrun.kernels.tiled_gemm import Workspace, limits, tiled_gemm
from dakrun.kernels.tiled_heuristics import tiled_config
from dakrun.kernels.tiled_shapes import MAX_ROWS, X_TILES, Limits
from dakrun.kernels.unpack import unpack
from dakrun.nn.remote_tier import sm_count

PIECE_BYTES = 64 << 20

_config = functools.cache(tiled_config)


def tiles(device: torch.device) -> Limits | None:
    """What `device` sets to the tiled GEMM, or None where torch had better compute."""
    if device.type != "cuda":
        return None
    found = limits(device.index)
    return found if found.x_tiles == X_TILES else None


class ManyRows:
    """Products on one device, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tiles = tiles(device)
        self._workspace: Workspace | None = None  # kept, as graphs read and write it
        if self._tiles is not None:
            # A launch for staged rows and the one behind it have all SMs each.
            self._workspace = Workspace.largest(2 * sm_count(device), device)
        # Of X, which SplitK_GEMM multiplies faster, be it in two passes.
        self.few_rows = 2 * SPLITK_ROWS if self._tiles is None else FEW_ROWS

    def takes(self, n: int, weight: PackedTensor) -> bool:
        """Whether products of `n` rows had better be computed here than by SplitK_GEMM."""
        remote = any(part.split.octets for part in weight.parts if part.tier != LOCAL)
        # A link is not to be waited for twice.
        return n > (min(self.few_rows, SPLITK_ROWS) if remote else self.few_rows)

    def __call__(
        self,
        x: torch.Tensor,
        weight: PackedTensor,
        accesses: Sequence[TierAccess],
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: Activation,
        overlap: bool,
    ) -> None:
        """out [N, M] = activation(x W^T + bias) + residual, which `out` may be.

        With `overlap` it may start while the kernel before it ends.
        """
        if self._tiles is None:
            _unpacked(x, weight, out, bias, residual, activation)
            return
        octets, sms = tuple(part.split.octets for part in weight.parts), sm_count(x.device)
        for first in range(0, len(x), MAX_ROWS):
            rows = slice(first, first + MAX_ROWS)
            config = _config(
                len(x[rows]), octets, tuple(accesses), cols=weight.shape[1], sms=sms,
                limits=self._tiles,
            )  # fmt: skip
            tiled_gemm(
                x[rows], weight, config, out[rows], bias=bias, activation=activation,
                residual=None if residual is None else residual[rows],
                workspace=self._workspace, overlap=overlap,
            )  # fmt: skip


def _unpacked(
    x: torch.Tensor,
    weight: PackedTensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: Activation,
) -> None:
    """The same by torch, with a part of the rows of W at a time."""
    rows, cols = weight.shape
    widest = max(cols, len(x))  # of what is unpacked, and of its products
    step = max(1, PIECE_BYTES // (widest * x.element_size() * OCTET_ROWS)) * OCTET_ROWS
    piece = x.new_empty(min(step, rows), cols)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        unpack(weight, piece[: last - first], first_row=first)
        y = F.linear(x, piece[: last - first], None if bias is None else bias[first:last])
        if activation == "silu_mul":
            out[:, first // 2 : last // 2] = F.silu(y[:, ::2]) * y[:, 1::2]
            continue
        if activation == "relu":
            y.relu_()
        if residual is not None:
            y += residual[:, first:last]
        out[:, first:last] = y
