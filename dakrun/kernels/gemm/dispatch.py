"""X W^T on a GPU by the fastest kernel for the number of rows of X, with the memory it needs.

SplitK_GEMM for few rows, or more rows and a small W; else the tiled GEMM on GPUs with wgmma, and
torch on others, from pieces of W that are unpacked. Knows operands, no models and no plans.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

from dakrun.config import Activation
from dakrun.geometry import (
    FEW_ROWS,
    ROWS_PER_BLOCK,
    SPLITK_MAX_ROWS,
    TILED_MAX_ROWS,
)
from dakrun.hardware import LOCAL, Card
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.gemm.scaled_rows import ScaledRows
from dakrun.kernels.gemm.splitk import FusedNorm
from dakrun.kernels.normalize import normalize
from dakrun.kernels.runtime.card import card_of
from dakrun.kernels.runtime.graph import capture_id
from dakrun.kernels.unpack import unpack
from dakrun.launches import (
    By,
    GemmConfig,
    TierAccess,
    TiledConfig,
    few_rows,
    gemm_config,
    kernel_for,
    most_rows_like,
    splitk_rows,
    tiled_config,
    tiles_for,
)
from dakrun.memory.matrix import TieredMatrix

PIECE_BYTES = 64 << 20  # of W to unpack for torch at a time, or of the product

_splitk_config = functools.cache(gemm_config)
_tiled_config = functools.cache(tiled_config)


class Products:
    """Products on one device, one after the other, which share the kernels' workspaces.

    Their launches are chosen for `card`. A workspace is allocated at its first use and kept, since
    captured graphs hold its address.
    """

    def __init__(self, device: torch.device, card: Card) -> None:
        self._device, self._card = device, card
        self._halves: dict[int, gemm.HalvesWorkspace] = {}  # by row blocks

    def kernel_for(self, n: int, weight: TieredMatrix) -> By:
        """Choose the kernel for `n` rows of X."""
        remote = any(part.split.row_blocks for part in weight.parts if part.tier != LOCAL)
        row_blocks = sum(part.split.row_blocks for part in weight.parts)
        return kernel_for(
            n, row_blocks, weight.shape[1], remote=remote, card=self._card,
            atom_bytes=weight.format.atom_bytes,
        )  # fmt: skip

    def variants(
        self, rows: Sequence[int], dtype: torch.dtype, *, mixes: bool = False
    ) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Kernel variants, (source, defines), for products of any of `rows` without a norm.

        With `mixes` also those for weights with mixed tiers.
        """
        few = max(few_rows(self._card), SPLITK_MAX_ROWS)
        for x_tiles in sorted({tiles_for(min(n, SPLITK_MAX_ROWS)) for n in rows if n <= few}):
            for macros in gemm.defines_of_tiers(dtype, x_tiles, mixes=mixes):
                yield gemm.SOURCE, macros
        if self._card.tiled and max(rows) > few_rows(self._card):
            every = tiled_gemm.all_defines(dtype, wgmma=self._card.has_wgmma)
            yield from ((tiled_gemm.SOURCE, macros) for macros in every)

    def reserve(self) -> None:
        """Allocate the workspace for many rows now."""
        if self._card.tiled:
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
        norm: FusedNorm = "none",
        eps: float = 0.0,
        scaled: ScaledRows | None = None,
        scales: ScaledRows | None = None,
        pdl: bool = False,
        ahead: torch.Tensor | None = None,
    ) -> None:
        """out [N, M] = activation(norm(x) W^T + bias) + residual; `residual` may be `out` itself.

        `accesses` has the limits of reading each part of W. The norm has no weight and no bias.
        If can_scale, x may be the rows of `scaled`: this product then does the second half of their
        RMSNorm. If `scales` is given, it does the first half of the next RMSNorm and writes it
        there (gemm.splitk_gemm).
        With `pdl` the launch may start while its predecessor ends. `ahead` may be prefetched into
        L2 for a later product.
        """
        by = self.kernel_for(len(x), weight)
        fuses = by == "splitk" and len(x) <= FEW_ROWS and not weight.format.macros
        if norm != "none" and not fuses:
            x = normalize(x, torch.empty_like(x), norm, eps=eps, pdl=pdl, pad_grid=by == "splitk")
            norm = "none"
        if by == "torch":
            _unpacked(x, weight, out, bias, residual, activation)
            return
        step = TILED_MAX_ROWS if by == "tiled" else splitk_rows(weight.format.atom_bytes)
        whole = len(x) <= step  # slices of tensors take as long as launches
        for first in range(0, len(x), step):
            rows = slice(first, first + step)
            part, to = (x, out) if whole else (x[rows], out[rows])
            added = residual if residual is None or whole else residual[rows]
            if by == "tiled":
                tiled = self._tiled_config(len(part), weight, accesses)
                tiled_gemm.tiled_gemm(
                    part, weight, tiled, to, bias=bias, residual=added,
                    activation=activation, pdl=pdl,
                    workspace=self.stream_k_workspace if tiled.stream_k_ctas else None,
                )  # fmt: skip
            else:
                cols = weight.shape[1] if norm == "none" else 0
                config = self._splitk_config(len(part), weight, accesses, cols)
                gemm.splitk_gemm(
                    part, weight, config, to, bias=bias, residual=added,
                    activation=activation, pdl=pdl, norm=norm, eps=eps, ahead=ahead,
                    scaled=None if scaled is None else scaled.of(rows),
                    scales=None if scales is None else scales.of(rows),
                    workspace=self._halves_workspace(config),
                )  # fmt: skip

    def can_scale(self, n: int, weight: TieredMatrix) -> bool:
        """Whether a product of `n` rows can read and write ScaledRows."""
        return bool(weight.format.macros) and self.kernel_for(n, weight) == "splitk"

    def holds_up_attention(self, n: int, weight: TieredMatrix) -> bool:
        """Whether a product of `n` rows keeps attention from its SMs until its CTAs end.

        Its registers leave no room there where it mixes tiers (kUnbounded, native/splitk_gemm.cu).
        """
        mixes = any(part.split.mixed for part in weight.parts)
        return mixes and bool(weight.format.macros) and n > ROWS_PER_BLOCK

    def ahead(
        self, n: int, weight: TieredMatrix, accesses: Sequence[TierAccess]
    ) -> torch.Tensor | None:
        """Bytes of `weight` to prefetch into L2 as the preceding product ends; X has `n` rows.

        None for many rows, or if the weight's first part is not in the GPU's own memory.
        """
        if n > FEW_ROWS or self.kernel_for(n, weight) != "splitk":
            return None
        return gemm.look_ahead(weight, self._splitk_config(n, weight, accesses, 0))

    def _splitk_config(
        self, n: int, weight: TieredMatrix, accesses: Sequence[TierAccess], cols: int
    ) -> GemmConfig:
        """The launch of SplitK_GEMM; halves of K are considered if W's `cols` are given."""
        splits = tuple(part.split for part in weight.parts)
        return _splitk_config(
            n, splits, tuple(accesses), card=self._card, cols=cols,
            atom_bytes=weight.format.atom_bytes,
        )  # fmt: skip

    def _tiled_config(
        self, n: int, weight: TieredMatrix, accesses: Sequence[TierAccess]
    ) -> TiledConfig:
        """The launches of the tiled GEMM, in which parts of one tier are one."""
        tiers, row_blocks = zip(*weight.row_blocks_by_tier, strict=True)
        access = {part.tier: how for part, how in zip(weight.parts, accesses, strict=True)}
        by_tier = tuple(access[tier] for tier in tiers)
        return _tiled_config(
            most_rows_like(n), row_blocks, by_tier, cols=weight.shape[1], card=self._card,
            atom_bytes=weight.format.atom_bytes,
        )  # fmt: skip

    def _halves_workspace(self, config: GemmConfig) -> gemm.HalvesWorkspace | None:
        """The workspace for the partial sums of halves of K, if `config` has them."""
        if not config.half_cols:
            return None
        row_blocks = sum(split.row_blocks for split in config.splits)
        if row_blocks not in self._halves:
            self._halves[row_blocks] = gemm.HalvesWorkspace.empty(config, self._device)
        return self._halves[row_blocks]

    @functools.cached_property
    def stream_k_workspace(self) -> tiled_gemm.StreamKWorkspace:
        """The workspace for Stream-K's partial tiles."""
        # An op's launches for remote and for local tiers may have all SMs each.
        return tiled_gemm.StreamKWorkspace.largest(2 * self._card.sms, self._device)


_current: dict[tuple[torch.device, int], tuple[int, Card, Products]] = {}


def products(device: torch.device) -> Products:
    """The Products of torch's current stream of a GPU, or of the graph being captured from it.

    Launches of one stream run one after the other. A graph may be replayed beside other launches,
    so its workspaces come from its own memory pool and are cleared by each replay.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    key, now = (device, stream), (capture_id(), card_of(device))
    if key not in _current or _current[key][:2] != now:
        _current[key] = *now, Products(device, now[1])
    return _current[key][2]


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
