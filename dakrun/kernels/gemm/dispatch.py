"""X W^T on a GPU by the fastest kernel for the number of rows of X, with the memory it needs.

SplitK_GEMM for few rows, or more rows and a small W; else the tiled GEMM on GPUs with wgmma, and
torch on others, from pieces of W that are unpacked. Knows operands, no models and no plans.
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
from dakrun.kernels.gemm.splitk import Activation, Norm
from dakrun.kernels.gemm.splitk_config import (
    GemmConfig,
    TierAccess,
    beats_tiled,
    gemm_config,
    tiles_for,
)
from dakrun.kernels.gemm.tiled_config import tiled_config
from dakrun.kernels.gemm.tiled_shapes import Limits
from dakrun.kernels.normalize import normalize
from dakrun.kernels.runtime.graph import capture_id
from dakrun.kernels.runtime.jit import sm_count
from dakrun.kernels.unpack import unpack
from dakrun.memory.matrix import TieredMatrix

PIECE_BYTES = 64 << 20  # of W to unpack for torch at a time, or of the product

By = Literal["splitk", "tiled", "torch"]
Launch = Callable[..., object]  # takes x, out and the epilogue's operands

_splitk_config = functools.cache(gemm_config)
_tiled_config = functools.cache(tiled_config)


def tiles(device: torch.device) -> Limits | None:
    """Limits of the tiled GEMM on `device`, or None where torch is faster."""
    if device.type != "cuda":
        return None
    found = tiled_gemm.limits(device.index)
    return found if found.x_tiles == TILED_X_TILES else None


class Products:
    """Products on one device, one after the other, which share the kernels' workspaces.

    A workspace is allocated at its first use and kept, since captured graphs hold its address.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._tiles = device, tiles(device)
        self._split_k_workspaces: dict[int, gemm.SplitKWorkspace] = {}  # by row blocks
        # Rows of X up to which SplitK_GEMM is faster, even in two launches.
        self.few_rows = 2 * SPLITK_MAX_ROWS if self._tiles is None else FEW_ROWS

    def kernel_for(self, n: int, weight: TieredMatrix) -> By:
        """Choose the kernel for `n` rows of X."""
        remote = any(part.split.row_blocks for part in weight.parts if part.tier != LOCAL)
        # Two launches would read a remote part twice.
        if n <= (min(self.few_rows, SPLITK_MAX_ROWS) if remote else self.few_rows):
            return "splitk"
        if self._tiles is None:
            return "torch"
        row_blocks = sum(part.split.row_blocks for part in weight.parts)
        small = n <= SPLITK_MAX_ROWS and beats_tiled(
            n, row_blocks, weight.shape[1], sms=sm_count(self._device)
        )
        return "splitk" if small else "tiled"

    def variants(
        self, rows: Sequence[int], dtype: torch.dtype, *, mixes: bool = False
    ) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Kernel variants, (source, defines), for products of any of `rows` without a norm.

        With `mixes` also those for weights with mixed tiers.
        """
        few = (min(n, SPLITK_MAX_ROWS) for n in rows if n <= max(self.few_rows, SPLITK_MAX_ROWS))
        for x_tiles in sorted({tiles_for(n) for n in few}):
            for macros in gemm.defines_of_tiers(dtype, x_tiles, mixes=mixes):
                yield gemm.SOURCE, macros
        if self._tiles is not None and max(rows) > self.few_rows:
            yield from ((tiled_gemm.SOURCE, macros) for macros in tiled_gemm.all_defines(dtype))

    def reserve(self) -> None:
        """Allocate the workspace for many rows now."""
        if self._tiles is not None:
            _ = self.stream_k_workspace

    def __call__(
        self,
        x: torch.Tensor,
        weight: TieredMatrix,
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
        """out [N, M] = activation(norm(x) W^T + bias) + residual; `residual` may be `out` itself.

        `accesses` has the limits of reading each part of W. The norm has no weight and no bias.
        With `pdl` the launch may start while its predecessor ends. `ahead` may be prefetched into
        L2 for a later product.
        """
        by = self.kernel_for(len(x), weight)
        if norm != "none" and (by != "splitk" or len(x) > FEW_ROWS):
            x = normalize(x, torch.empty_like(x), norm, eps=eps, pdl=pdl, pad_grid=by == "splitk")
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
        self, n: int, weight: TieredMatrix, accesses: Sequence[TierAccess]
    ) -> torch.Tensor | None:
        """Bytes of `weight` to prefetch into L2 as the preceding product ends; X has `n` rows.

        None for many rows, or if the weight's first part is not in the GPU's own memory.
        """
        if n > FEW_ROWS or self.kernel_for(n, weight) != "splitk":
            return None
        splits, sms = tuple(part.split for part in weight.parts), sm_count(self._device)
        return gemm.look_ahead(weight, _splitk_config(n, splits, tuple(accesses), sms=sms, cols=0))

    def _splitk(
        self,
        n: int,
        weight: TieredMatrix,
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
            workspace=self._split_k_workspace(config), ahead=ahead,
        )  # fmt: skip

    def _tiled(self, n: int, weight: TieredMatrix, accesses: tuple[TierAccess, ...]) -> Launch:
        assert self._tiles is not None
        tiers, row_blocks = zip(*tiled_gemm.row_blocks_by_tier(weight), strict=True)
        access = {part.tier: how for part, how in zip(weight.parts, accesses, strict=True)}
        config = _tiled_config(
            n, row_blocks, tuple(access[tier] for tier in tiers), cols=weight.shape[1],
            sms=sm_count(self._device), limits=self._tiles,
            multicast=all(how.multicast for how in accesses),
        )  # fmt: skip
        workspace = self.stream_k_workspace if config.stream_k_ctas else None
        return partial(tiled_gemm.tiled_gemm, weight=weight, config=config, workspace=workspace)

    def _split_k_workspace(self, config: GemmConfig) -> gemm.SplitKWorkspace | None:
        """The workspace for split-K's partial sums, if `config` splits K."""
        if not config.split_k_cols:
            return None
        row_blocks = sum(split.row_blocks for split in config.splits)
        if row_blocks not in self._split_k_workspaces:
            workspace = gemm.SplitKWorkspace.empty(config, self._device)
            self._split_k_workspaces[row_blocks] = workspace
        return self._split_k_workspaces[row_blocks]

    @functools.cached_property
    def stream_k_workspace(self) -> tiled_gemm.StreamKWorkspace:
        """The workspace for Stream-K's partial tiles."""
        # An op's launches for remote and for local tiers may have all SMs each.
        return tiled_gemm.StreamKWorkspace.largest(2 * sm_count(self._device), self._device)


_current: dict[tuple[torch.device, int], tuple[int, Products]] = {}


def products(device: torch.device) -> Products:
    """The Products of torch's current stream of a GPU, or of the graph being captured from it.

    Launches of one stream run one after the other. A graph may be replayed beside other launches,
    so its workspaces come from its own memory pool and are cleared by each replay.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    key, capture = (device, stream), capture_id()
    if key not in _current or _current[key][0] != capture:
        _current[key] = capture, Products(device)
    return _current[key][1]


def _unpacked(
    x: torch.Tensor,
    weight: TieredMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: Activation,
) -> None:
    """Multiply with torch, some rows of W at a time."""
    rows, cols = weight.shape
    widest = max(cols, len(x))  # of the unpacked rows, and of their products
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
