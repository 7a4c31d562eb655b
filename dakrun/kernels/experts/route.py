"""The experts of each row, and the rows of each expert; wraps native/route.cu.

reference.py has the same choice in plain torch.
"""

import ctypes
from dataclasses import dataclass
from functools import partial

import torch

from dakrun.config import Routing
from dakrun.geometry import CHUNK
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.card import card_of
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.launches import (
    MAX_EXPERTS,
    ROUTER_COLS,
    ROUTER_EXPERTS,
    ROUTER_LOGITS,
    ROUTER_MAX_ROWS,
    ROUTER_TILE_ROWS,
    router_ctas,
    router_logits,
    router_rows,
)
from dakrun.units import ceil_div

SOURCE = "route.cu"
WARPS, WARP = 8, 32  # of a CTA; threads of a warp
MAX_CHOSEN, MAX_GROUPS = 32, 32
SUMS_BYTES = 2 * WARPS * ROUTER_TILE_ROWS * (ROUTER_EXPERTS + 4) * 4  # of partial logits


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("x", "weight", "bias", "lengths", "tokens", "weights", "ends", "pairs"),
        *operands.pointers("stacked", "use"),
        *operands.pointers("logits", "chosen", "counts"),
        *operands.ints("n", "hidden", "experts", "top_k", "band_rows", "chooser_rows"),
        *operands.ints("groups", "top_groups", "sigmoid", "renormalized"),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Routed:
    """The choices of up to N rows, k experts each, as pairs of an expert and a row, on one GPU.

    Pairs are in the order of the experts in the stacked matrices, then of rows. `tokens`, int32
    [N k], are their rows, `weights`, float32 [N k], those of their experts; `ends`, int32 [E], are
    the numbers of pairs of the stack indices up to each. `pairs`, int32 [N, k], are the pairs of
    each row, by ascending number of their experts; -1 in rows without a request. `scratch` belongs
    to the kernel.
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    ends: torch.Tensor
    pairs: torch.Tensor
    scratch: dict[str, torch.Tensor]

    @classmethod
    def allocate(
        cls, rows: int, routing: Routing, hidden: int, device: torch.device | str
    ) -> "Routed":
        """Room for up to `rows` rows [H] of `hidden` columns."""
        experts, top_k, bands = routing.experts, routing.top_k, ceil_div(rows, ROUTER_TILE_ROWS)
        logits = ceil_div(hidden, ROUTER_COLS), rows, router_logits(experts)
        pairs = torch.empty(2, rows * top_k, dtype=torch.int32, device=device)
        # The kernel waits for each word to change, and sets all its bits again. Choices are read in
        # twos.
        unwritten = partial(torch.full, fill_value=-1, dtype=torch.int32, device=device)
        scratch = {
            "logits": unwritten(logits).view(torch.float32),
            "chosen": unwritten((rows * top_k + 1, 2)).view(torch.float32),
            "counts": torch.empty(bands, experts, dtype=torch.int32, device=device),
        }
        return cls(
            pairs[0],
            pairs[1].view(torch.float32),
            torch.empty(experts, dtype=torch.int32, device=device),
            torch.empty(rows, top_k, dtype=torch.int32, device=device),
            scratch,
        )


def can_route(routing: Routing) -> bool:
    """Whether the kernel chooses experts by `routing`."""
    sizes = routing.experts, routing.top_k, routing.groups
    return all(
        n <= most for n, most in zip(sizes, (MAX_EXPERTS, MAX_CHOSEN, MAX_GROUPS), strict=True)
    )


def defines(dtype: torch.dtype, experts: int) -> Macros:
    """Macros of the variant for rows of `dtype` and `experts` experts, up to MAX_EXPERTS."""
    sizes = {
        "ROUTE_WARPS": WARPS,
        "ROUTE_EXPERTS": ROUTER_EXPERTS,
        "ROUTE_COLS": ROUTER_COLS,
        "ROUTE_TILE_ROWS": ROUTER_TILE_ROWS,
        "ROUTE_MAX_ROWS": ROUTER_MAX_ROWS,
        "ROUTE_PER_LANE": router_logits(experts) // WARP,
    }
    return operands.defines(dtype) | sizes


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    out: Routed,
    *,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    stacked: torch.Tensor | None = None,
    use: torch.Tensor | None = None,
    pdl: bool = False,
) -> Routed:
    """Choose the experts of x [N, H], of 16 bits, by a router's weight [E, H] and bias [E].

    Weight and bias are float32; sums are float32, with the same bits however many rows there are.
    Rows with negative `lengths`, int32 [N], are without a request and choose none. `stacked`,
    int32 [E], has the index of each expert in stacked matrices, by default its number. The launch
    adds to `use`, int32 [2, E], the rows that chose each expert, and 1 to each index that any did.
    With `pdl` it may start before its predecessor ends; a successor may start before `out` is
    complete. More than ROUTER_MAX_ROWS rows take two launches. Returns `out`, which has room for N
    rows of H columns. Raises ValueError if an operand has the wrong shape, dtype, device or
    alignment, or for more experts, choices or groups than the kernel takes.
    """
    if x.dtype not in operands.DTYPES or x.dim() != 2 or not x.numel() or x.shape[1] % CHUNK:
        raise ValueError(
            f"expected x as [N, H] in 16 bits with H a multiple of {CHUNK}, got {list(x.shape)} "
            f"of {x.dtype}"
        )
    if not can_route(routing):
        raise ValueError(
            f"expected up to {MAX_EXPERTS} experts, {MAX_CHOSEN} a row, {MAX_GROUPS} groups"
        )
    (n, hidden), experts = x.shape, routing.experts
    room = len(out.pairs)
    logits = ceil_div(hidden, ROUTER_COLS), room, router_logits(experts)
    wanted: dict[str, operands.Wanted] = {
        "x": (x, (n, hidden), x.dtype),
        "weight": (weight, (experts, hidden), torch.float32),
        "bias": (bias, (experts,), torch.float32),
        "lengths": (lengths, (n,), torch.int32),
        "stacked": (stacked, (experts,), torch.int32),
        "use": (use, (2, experts), torch.int32),
        "ends": (out.ends, (experts,), torch.int32),
        "pairs": (out.pairs, (max(n, room), routing.top_k), torch.int32),
        "logits": (out.scratch["logits"], logits, torch.float32),
    }
    operands.check_operands(x.device, wanted)
    if weight.data_ptr() % operands.ALIGNMENT:
        raise ValueError(f"expected weight to be aligned to {operands.ALIGNMENT} bytes")
    operands.check_gpu(x.device)
    card = card_of(x.device)
    band = router_rows(n, experts=experts, hidden=hidden, card=card)
    bands, choosing_rows = ceil_div(n, band), WARPS if n <= ROUTER_MAX_ROWS else band
    args = _Args(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=operands.address(bias),
        lengths=operands.address(lengths),
        tokens=out.tokens.data_ptr(),
        weights=out.weights.data_ptr(),
        ends=out.ends.data_ptr(),
        pairs=out.pairs.data_ptr(),
        stacked=operands.address(stacked),
        use=operands.address(use),
        **{name: scratch.data_ptr() for name, scratch in out.scratch.items()},
        n=n,
        hidden=hidden,
        experts=experts,
        top_k=routing.top_k,
        band_rows=band,
        chooser_rows=choosing_rows,
        groups=routing.groups,
        top_groups=routing.top_groups,
        sigmoid=routing.scores == "sigmoid",
        renormalized=routing.renormalized,
        scale=routing.scale,
    )
    macros = defines(x.dtype, experts)
    # CTAs that choose have pairs of rows, and of an expert a mask of rows and two counts.
    placing = min(n, ROUTER_MAX_ROWS) * routing.top_k * 8 + experts * (ROUTER_MAX_ROWS // 8 + 8)
    choosing = 4 * WARPS * experts if routing.groups > 1 else 0
    ctas = card.with_idle(bands * router_ctas(experts, hidden) + ceil_div(n, choosing_rows))
    threads = WARPS * WARP
    shared_bytes = max(SUMS_BYTES, placing + choosing, card.ringless_bytes(n, ctas))
    jit.kernel(SOURCE, "route", macros).launch(
        ctas, threads, args, shared_bytes=shared_bytes, pdl=pdl
    )
    if n > ROUTER_MAX_ROWS:
        kernel = jit.kernel(SOURCE, "number_pairs", macros)
        kernel.launch(bands, threads, args, shared_bytes=placing, pdl=pdl)
    return out


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    if needs.every:
        return [defines(needs.dtype, count) for count in ROUTER_LOGITS]
    return [defines(needs.dtype, needs.routing.experts)] if needs.routing else []
