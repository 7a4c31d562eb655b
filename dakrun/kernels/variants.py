"""The kernel variants that a model needs, so that they are compiled ahead and in parallel.

Each wrapper registers its own (runtime/needs.py). Needs no GPU.
"""

import itertools
import pkgutil
from collections.abc import Iterable
from importlib import import_module

import torch

from dakrun.config import Routing
from dakrun.formats import KERNEL_FORMATS, PACKED16, WeightFormat
from dakrun.geometry import HEAD_DIMS, SPLITK_MAX_ROWS
from dakrun.hardware import Card
from dakrun.kernels.runtime import operands
from dakrun.kernels.runtime.needs import Needs, Variant, needed


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
    routing: Routing | None = None,
    formats: Iterable[WeightFormat] = (PACKED16,),
) -> list[Variant]:
    """Variants for a model with `head_dim` and `group` query heads per KV head, on `card`.

    The variants that take longest to compile come first; Needs describes the options.
    Raises ValueError for `rows` that SplitK_GEMM does not take.
    """
    return needed(
        Needs(
            dtype=dtype, rows=tuple(rows), card=card, head_dim=head_dim, group=group, mixes=mixes,
            spills=spills, head_norms=head_norms, routing=routing, formats=tuple(formats),
        )
    )  # fmt: skip


def all_variants(arch: str) -> list[Variant]:
    """Every variant of every kernel for `arch`, one of runtime.ARCHITECTURES."""
    package = __package__ or ""
    for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        import_module(module.name)
    card = Card.of(f"{arch[3:-2]}.{arch[-2]}", sms=1)
    found: list[Variant] = []
    for dtype, head_dim, group, spills, head_norms in itertools.product(
        operands.DTYPES, HEAD_DIMS, (8, 16), (False, True), (False, True)
    ):
        found += needed(
            Needs(
                dtype=dtype, rows=range(1, SPLITK_MAX_ROWS + 1), card=card,
                head_dim=head_dim, group=group, mixes=True, spills=spills, head_norms=head_norms,
                every=True, formats=KERNEL_FORMATS,
            )
        )  # fmt: skip
    return [(source, dict(macros)) for source, macros in dict.fromkeys(map(_hashable, found))]


def _hashable(variant: Variant) -> tuple[str, tuple[tuple[str, int], ...]]:
    source, macros = variant
    return source, tuple(macros.items())
