"""Packed weights in the tiers of a GPU, random operands between NaN guards, bitwise comparison."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from cards import here

from dakrun.formats import PACKED16
from dakrun.geometry import row_block_count
from dakrun.kernels.gemm import FusedNorm, HalvesWorkspace, splitk_gemm
from dakrun.launches import GemmConfig, TierAccess, gemm_config, split_row_blocks
from dakrun.memory.device import enable_peer_access
from dakrun.memory.matrix import MatrixPart, TieredMatrix

GUARD = 64  # elements
TIERS = ("hbm", "host", "peer")
ACCESS = (TierAccess(), TierAccess(sms=8, window_bytes=256 * 1024), TierAccess(sms=16))


def all_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def guarded(values: torch.Tensor) -> torch.Tensor:
    """The values on the GPU with NaN before and behind them."""
    size = values.numel()
    room = torch.full((size + 2 * GUARD,), math.nan, dtype=values.dtype, device="cuda")
    inside = room[GUARD : GUARD + size].view(values.shape)
    return inside.copy_(values)


def poisoned(n: int, m: int, dtype: torch.dtype) -> torch.Tensor:
    return guarded(torch.full((n, m), math.nan, dtype=dtype, device="cuda"))


def written(out: torch.Tensor) -> bool:
    """Whether a poisoned output is all numbers, and its guards are untouched."""
    room = out.as_strided((out.numel() + 2 * GUARD,), (1,), 0)
    return int(room.isnan().sum()) == 2 * GUARD and not bool(out.isnan().any())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@functools.cache
def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random numbers, the same for the same arguments."""
    seed = sum(7919**place * size for place, size in enumerate(shape))
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = scale * torch.randn(shape, generator=generator, device="cuda")
    return guarded(values.to(dtype))


def weight_of(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return normal(m, k, dtype=dtype, scale=k**-0.5)


@dataclass(frozen=True)
class Linear:
    """A packed weight and how its tiers are read."""

    weight: TieredMatrix
    access: tuple[TierAccess, ...]
    sms: int

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, *, norm: FusedNorm = "none", **options: Any
    ) -> torch.Tensor:
        splits = [part.split for part in self.weight.parts]
        cols = self.weight.shape[1] if norm == "none" else 0
        config = gemm_config(x.shape[0], splits, self.access, card=here(self.sms), cols=cols)
        return splitk_gemm(
            x, self.weight, config, out, norm=norm, workspace=workspace(config), **options
        )


@functools.cache
def workspace(config: GemmConfig) -> HalvesWorkspace:
    """One for all launches, which run one after the other."""
    return HalvesWorkspace.empty(config, "cuda")


@functools.cache
def linear(
    m: int,
    k: int,
    dtype: torch.dtype,
    row_blocks: tuple[int, ...] = (),
    *,
    access: tuple[TierAccess, ...] = ACCESS,
    sms: int = 0,
    even_waves: bool = True,
) -> Linear:
    """A weight with `row_blocks` in HBM, page-locked and a peer's memory; by default all in HBM."""
    dense, row_blocks = weight_of(m, k, dtype), row_blocks or (row_block_count(m),)
    access, sms = access[: len(row_blocks)], sms or all_sms()
    splits = split_row_blocks(row_blocks, access, card=here(sms, even_waves=even_waves))
    parts, first = [], 0
    for tier, split in zip(TIERS[: len(splits)], splits, strict=True):
        (data,) = PACKED16.pack(dense[8 * first : 8 * (first + split.row_blocks)], split)
        parts.append(MatrixPart(tier, split, PACKED16, (moved(data, tier),)))
        first += split.row_blocks
    return Linear(TieredMatrix((m, k), dtype, tuple(parts)), access, sms)


def moved(data: torch.Tensor, tier: str) -> torch.Tensor:
    """Copy bytes to their tier; page-locked memory stands in for a peer that cannot be read."""
    if tier == "hbm" or not data.numel():
        return data
    here = torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != here]
    peers = [i for i in others if torch.cuda.can_device_access_peer(here, i)]
    if tier == "host" or not peers:
        return data.cpu().pin_memory()
    enable_peer_access(peers[0], here)
    return data.to(torch.device("cuda", peers[0]))
