"""The kernel variants that a model needs, so that they are compiled ahead and in parallel.

Needs no GPU.
"""

from collections.abc import Iterable, Iterator

import torch

from dakrun.formats import KERNEL_FORMATS, PACKED16, WeightFormat
from dakrun.geometry import FEW_ROWS, HEAD_DIMS, SPLITK_MAX_ROWS
from dakrun.hardware import ANY_ROWS, Card
from dakrun.kernels.attention import prompt
from dakrun.kernels.attention import splitk as attention
from dakrun.kernels.attention.copy_blocks import SOURCE as COPY_BLOCKS
from dakrun.kernels.bandwidth import SOURCE as BANDWIDTH
from dakrun.kernels.embed import SOURCE as EMBED
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.normalize import SOURCE as NORMALIZE
from dakrun.kernels.normalize_heads import SOURCE as NORMALIZE_HEADS
from dakrun.kernels.route import SOURCE as ROUTE
from dakrun.kernels.route import defines as route_defines
from dakrun.kernels.runtime import operands
from dakrun.kernels.select_token import SOURCE as SELECT_TOKEN
from dakrun.kernels.store_kv import SOURCE as STORE_KV
from dakrun.kernels.unpack import SOURCE as UNPACK
from dakrun.kernels.unpack import defines as unpack_defines
from dakrun.launches import splitk_rows, tiled_rows, tiles_for

Variant = tuple[str, dict[str, int]]  # a file of native/, and the macros of the variant


def variants(
    dtype: torch.dtype,
    rows: Iterable[int],
    card: Card,
    *,
    head_dim: int,
    group: int = 1,
    mixes: bool = False,
    spills: bool = False,
    head_norms: bool = False,
    formats: Iterable[WeightFormat] = (PACKED16,),
) -> list[Variant]:
    """Variants for a model with `head_dim` and `group` query heads per KV head, on `card`.

    The variants that take longest to compile come first.
    SplitK_GEMM is launched for each of `rows` rows of X, with a fused norm up to FEW_ROWS, and with
    `mixes` also for weights with mixed tiers. With `spills`, slots of attention may spill; with
    `head_norms`, attention normalizes query and key heads. Many rows need the tiled GEMM, or
    `unpack`, for torch. Weights have any of `formats`.
    Raises ValueError for `rows` that SplitK_GEMM does not take.
    """
    formats, rows = list(formats), list(rows)
    tiled = {stored: tiled_rows(card, stored.atom_bytes) for stored in formats}
    return [
        *(v for stored, most in tiled.items() if most for v in _tiled(dtype, card, stored)),
        *(_unpack(dtype, stored) for stored, most in tiled.items() if most < ANY_ROWS),
        *_attention(dtype, head_dim, card, group, reads_spilled=spills, head_norms=head_norms),
        *(
            variant
            for stored in formats
            for variant in _splitk(dtype, _sizes(rows, stored), stored, mixes=mixes)
        ),
        (COPY_BLOCKS, {}),
        *_small(dtype),
        *(_embed(dtype, stored) for stored in formats),
    ]


def attention_variant(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    *,
    prefixes: bool = False,
    reads_spilled: bool = False,
    head_norms: bool = False,
) -> Variant:
    """The variant of SplitK_FlashAttn for `group` query heads per KV head."""
    macros = attention.defines(
        dtype,
        head_dim,
        group,
        prefixes=prefixes,
        reads_spilled=reads_spilled,
        head_norms=head_norms,
    )
    return attention.SOURCE, macros


def prompt_variant(
    dtype: torch.dtype, head_dim: int, card: Card, *, prefixes: bool = False
) -> Variant:
    """The variant of prompt attention on `card`."""
    return prompt.SOURCE, prompt.defines(dtype, head_dim, card, prefixes=prefixes)


def _attention(
    dtype: torch.dtype,
    head_dim: int,
    card: Card,
    *groups: int,
    reads_spilled: bool = False,
    head_norms: bool = False,
) -> Iterator[Variant]:
    """The variants of both attention kernels, with and without shared prefixes."""
    for prefixes in (False, True):
        yield prompt_variant(dtype, head_dim, card, prefixes=prefixes)
        for group in groups:
            yield attention_variant(
                dtype, head_dim, group, prefixes=prefixes, reads_spilled=reads_spilled,
                head_norms=head_norms and not prefixes,
            )  # fmt: skip


def all_variants(arch: str) -> list[Variant]:
    """Every variant of every kernel for `arch`, one of runtime.ARCHITECTURES."""
    card = Card.of(f"{arch[3:-2]}.{arch[-2]}", sms=1)
    found: list[Variant] = [(BANDWIDTH, {}), (COPY_BLOCKS, {})]
    for dtype in operands.DTYPES:
        for stored in KERNEL_FORMATS:
            found += _tiled(dtype, card, stored)
            if stored == PACKED16:
                found += ((gemm.SOURCE, macros) for macros in gemm.all_defines(dtype))
            else:
                rows = range(1, SPLITK_MAX_ROWS + 1)
                found += _splitk(dtype, _sizes(rows, stored), stored, mixes=True)
            found += [_unpack(dtype, stored), _embed(dtype, stored)]
        for head_dim in HEAD_DIMS:
            found += _attention(dtype, head_dim, card, 8, 16)
            found += (
                attention_variant(dtype, head_dim, group, prefixes=prefixes, reads_spilled=True)
                for group in (8, 16)
                for prefixes in (False, True)
            )
            found += (
                attention_variant(
                    dtype, head_dim, group, reads_spilled=reads_spilled, head_norms=True
                )
                for group in (8, 16)
                for reads_spilled in (False, True)
            )
        found += [*_small(dtype), (ROUTE, route_defines(dtype))]
    return list({(source, *macros.items()): (source, macros) for source, macros in found}.values())


# The variants of kernels that read weights, in a format.


def _tiled(dtype: torch.dtype, card: Card, stored: WeightFormat) -> list[Variant]:
    every = tiled_gemm.all_defines(dtype, wgmma=card.has_wgmma, format=stored)
    return [(tiled_gemm.SOURCE, macros) for macros in every]


def _splitk(
    dtype: torch.dtype, sizes: Iterable[tuple[int, bool]], stored: WeightFormat, *, mixes: bool
) -> list[Variant]:
    """Of `sizes`: tiles of X, and whether it is normalized."""
    return [
        (gemm.SOURCE, {**macros, **stored.macros})
        for x_tiles, norm in sorted(sizes, reverse=True)
        for macros in gemm.defines_of_tiers(dtype, x_tiles, norm, mixes=mixes)
    ]


def _sizes(rows: Iterable[int], stored: WeightFormat) -> set[tuple[int, bool]]:
    """Tiles of X and whether it is normalized, for the launches of products of any of `rows`."""
    if stored == PACKED16:
        return {(tiles_for(n), norm) for n in rows for norm in (False, n <= FEW_ROWS)}
    most = splitk_rows(stored.atom_bytes)
    launched = {part for n in rows for part in (min(n, most), n % most or most)}
    return {(tiles_for(n), False) for n in launched}


def _unpack(dtype: torch.dtype, stored: WeightFormat) -> Variant:
    return UNPACK, unpack_defines(dtype, stored)


def _embed(dtype: torch.dtype, stored: WeightFormat) -> Variant:
    return EMBED, {**operands.defines(dtype), **stored.macros}


def _small(dtype: torch.dtype) -> list[Variant]:
    sources = (SELECT_TOKEN, NORMALIZE, NORMALIZE_HEADS, STORE_KV)
    return [(source, operands.defines(dtype)) for source in sources]
