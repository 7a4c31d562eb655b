"""X W^T on a GPU by whichever kernel is the fastest for so many rows of X, with what it needs.

SplitK_GEMM for few rows, or some more and a small W, else the tiled GEMM where the GPU has wgmma;
elsewhere torch, from what is unpacked piece by piece. Knows operands, no models and no plans.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from dakrun.geometry import (
    FEW_ROWS,
    ROWS_PER_BLOCK,
    SPLITK_MAX_ROWS,
    TILED_MAX_ROWS,
    TILED_X_TILES,
)
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.gemm.splitk import Activation, Norm
from dakrun.kernels.gemm.splitk_config import (
    GemmConfig,
    TierAccess,
    gemm_config,
    reads_little,
    tiles_for,
)
from dakrun.kernels.gemm.tiled_config import tiled_config
from dakrun.kernels.gemm.tiled_shapes import Limits
from dakrun.kernels.normalize import normalize
from dakrun.kernels.runtime.graph import capture_id
from dakrun.kernels.runtime.jit import sm_count
from dakrun.kernels.unpack import unpack

PIECE_BYTES = 64 << 20

By = Literal["splitk", "tiled", "torch"]
Launch = Callable[..., object]  # of x, out and the epilogue

_splitk_config = functools.cache(gemm_config)
_tiled_config = functools.cache(tiled_config)


def tiles(device: torch.device) -> Limits | None:
    """What `device` sets to the tiled GEMM, or None where torch had better compute."""
    if device.type != "cuda":
        return None
    found = tiled_gemm.limits(device.index)
    return found if found.x_tiles == TILED_X_TILES else None


class Products:
    """Products on one device, one after the other: they share what memory the kernels need.

    That is taken when it is first needed, and kept, as graphs read and write it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._tiles = device, tiles(device)
        self._halves: dict[int, gemm.Workspace] = {}  # by row blocks
        # Of X, which SplitK_GEMM multiplies faster, be it in two passes.
        self.few_rows = 2 * SPLITK_MAX_ROWS if self._tiles is None else FEW_ROWS

    def by(self, n: int, weight: PackedTensor) -> By:
        """What computes products of `n` rows."""
        remote = any(part.split.row_blocks for part in weight.parts if part.tier != LOCAL)
        # A link is not to be waited for twice.
        if n <= (min(self.few_rows, SPLITK_MAX_ROWS) if remote else self.few_rows):
            return "splitk"
        if self._tiles is None:
            return "torch"
        row_blocks = sum(part.split.row_blocks for part in weight.parts)
        little = n <= SPLITK_MAX_ROWS and reads_little(
            n, row_blocks, weight.shape[1], sms=sm_count(self._device)
        )
        return "splitk" if little else "tiled"

    def variants(
        self, rows: Sequence[int], dtype: torch.dtype, *, mixes: bool = False
    ) -> Iterator[tuple[str, Mapping[str, int]]]:
        """(source, defines) of the kernels for products of so many rows without a norm.

        With `mixes` also of weights whose tiers are mixed.
        """
        few = (min(n, SPLITK_MAX_ROWS) for n in rows if n <= max(self.few_rows, SPLITK_MAX_ROWS))
        for x_tiles in sorted({tiles_for(n) for n in few}):
            for macros in gemm.defines_of_tiers(dtype, x_tiles, mixes=mixes):
                yield gemm.SOURCE, macros
        if self._tiles is not None and max(rows) > self.few_rows:
            yield from ((tiled_gemm.SOURCE, macros) for macros in tiled_gemm.all_defines(dtype))

    def reserve(self) -> None:
        """Take the memory for many rows now."""
        if self._tiles is not None:
            _ = self._carried

    def __call__(
        self,
        x: torch.Tensor,
        weight: PackedTensor,
        accesses: Sequence[TierAccess],
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: Activation = "none",
        norm: Norm = "none",
        eps: float = 0.0,
        pdl: bool = False,
        ahead: torch.Tensor | None = None,
    ) -> None:
        """out [N, M] = activation(norm(x) W^T + bias) + residual, which `out` may be.

        `accesses` say how W's tiers are read. The norm is without weight and bias. With `pdl`
        it may start while the kernel before it ends. L2 may be brought what is `ahead`.
        """
        by = self.by(len(x), weight)
        if norm != "none" and (by != "splitk" or len(x) > FEW_ROWS):
            x = normalize(x, torch.empty_like(x), norm, eps=eps, pdl=pdl, fills_sms=by == "splitk")
            norm = "none"
        if by == "torch":
            _unpacked(x, weight, out, bias, residual, activation)
            return
        step = TILED_MAX_ROWS if by == "tiled" else SPLITK_MAX_ROWS
        for first in range(0, len(x), step):
            rows = slice(first, first + step)
            if by == "tiled":
                launch = self._tiled(len(x[rows]), weight, tuple(accesses))
            else:
                launch = self._splitk(len(x[rows]), weight, tuple(accesses), norm, eps, ahead)
            launch(
                x[rows], out=out[rows], bias=bias, activation=activation, pdl=pdl,
                residual=None if residual is None else residual[rows],
            )  # fmt: skip

    def ahead(
        self, n: int, weight: PackedTensor, accesses: Sequence[TierAccess]
    ) -> torch.Tensor | None:
        """What L2 is to bring of `weight` for a product of `n` rows, while the one before it ends.

        Nothing where that has many rows, or where it is not read from the GPU's own memory.
        """
        if n > FEW_ROWS or self.by(n, weight) != "splitk":
            return None
        splits, sms = tuple(part.split for part in weight.parts), sm_count(self._device)
        return gemm.look_ahead(weight, _splitk_config(n, splits, tuple(accesses), sms=sms, cols=0))

    def _splitk(
        self,
        n: int,
        weight: PackedTensor,
        accesses: tuple[TierAccess, ...],
        norm: Norm,
        eps: float,
        ahead: torch.Tensor | None,
    ) -> Launch:
        splits = tuple(part.split for part in weight.parts)
        cols = weight.shape[1] if norm == "none" else 0
        config = _splitk_config(n, splits, accesses, sms=sm_count(self._device), cols=cols)
        return partial(
            gemm.splitk_gemm, weight=weight, config=config, norm=norm, eps=eps,
            workspace=self._meeting(config), ahead=ahead,
        )  # fmt: skip

    def _tiled(self, n: int, weight: PackedTensor, accesses: tuple[TierAccess, ...]) -> Launch:
        assert self._tiles is not None
        tiers, row_blocks = zip(*tiled_gemm.row_blocks_by_tier(weight), strict=True)
        access = {part.tier: how for part, how in zip(weight.parts, accesses, strict=True)}
        config = _tiled_config(
            n, row_blocks, tuple(access[tier] for tier in tiers), cols=weight.shape[1],
            sms=sm_count(self._device), limits=self._tiles,
        )  # fmt: skip
        workspace = self._carried if config.carriers else None
        return partial(tiled_gemm.tiled_gemm, weight=weight, config=config, workspace=workspace)

    def _meeting(self, config: GemmConfig) -> gemm.Workspace | None:
        """Where halves of sums meet."""
        if not config.half_cols:
            return None
        row_blocks = sum(split.row_blocks for split in config.splits)
        if row_blocks not in self._halves:
            self._halves[row_blocks] = gemm.Workspace.empty(config, self._device)
        return self._halves[row_blocks]

    @functools.cached_property
    def _carried(self) -> tiled_gemm.Workspace:
        """Where clusters of the tiled GEMM leave sums for others."""
        # A launch for tiers without limits and the one behind it have all SMs each.
        return tiled_gemm.Workspace.largest(2 * sm_count(self._device), self._device)


_current: dict[tuple[torch.device, int], tuple[int, Products]] = {}


def products(device: torch.device) -> Products:
    """Those on torch's current stream of a GPU, or in the graph that is captured from it.

    What a stream launches runs one after the other. A graph may be replayed beside anything: what
    it needs is taken from its own memory, and cleared by each replay.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    key, capture = (device, stream), capture_id()
    if key not in _current or _current[key][0] != capture:
        _current[key] = capture, Products(device)
    return _current[key][1]


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
    step = max(1, PIECE_BYTES // (widest * x.element_size() * ROWS_PER_BLOCK)) * ROWS_PER_BLOCK
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
