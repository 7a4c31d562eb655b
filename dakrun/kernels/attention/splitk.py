"""SplitK_FlashAttn: decode attention over slots in several tiers; wraps splitk_flash_attn.cu.

Knows operands and a configuration, no models and no plans.
"""

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from dakrun.geometry import (
    ATTENTION_PARTIAL_EXTRA,
    ATTENTION_WARPS,
    ATTENTION_WARPS_LARGE_GROUP,
    KV_BLOCK,
    MAX_GROUP_HEADS,
    MAX_TIERS,
)
from dakrun.kernels.attention.config import AttentionConfig
from dakrun.kernels.attention.kv_blocks import DTYPES
from dakrun.kernels.runtime.jit import Kernel, kernel
from dakrun.kernels.runtime.operands import CtaOrder
from dakrun.units import ceil_div

SOURCE = "splitk_flash_attn.cu"


class _Tier(ctypes.Structure):
    _fields_ = (
        ("first_slot", ctypes.c_int),
        ("first_cta", ctypes.c_int),
        ("window", ctypes.c_int),
        ("slot_step", ctypes.c_int),
        ("heads", ctypes.c_int),
    )


class _Args(ctypes.Structure):
    _fields_ = (
        ("tiers", _Tier * (MAX_TIERS + 1)),
        *((name, ctypes.c_uint64) for name in ("caches", "lengths", "q", "k", "v", "rotations")),
        *((name, ctypes.c_uint64) for name in ("out", "partials", "arrivals")),
        ("stride", ctypes.c_int64),
        ("order", CtaOrder),
        *((name, ctypes.c_int) for name in ("tier_count", "kv_heads", "group", "slot_blocks")),
        *((name, ctypes.c_int) for name in ("unit_blocks", "part_blocks", "item_units")),
        *((name, ctypes.c_int) for name in ("max_units", "max_parts", "stages")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Workspace:
    """Where units and parts meet: one for all launches of a stream.

    `partials` is float32 [slots, Hkv, units, parts, group, D + 4], `arrivals` int32 [slots, Hkv,
    group + units], zero between launches.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, config: AttentionConfig, group: int, device: torch.device) -> "Workspace":
        """For launches of `config` with `group` query heads for each KV head."""
        partials, arrivals = _workspace_sizes(config, group)
        return cls(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(arrivals, dtype=torch.int32, device=device),
        )


def _workspace_sizes(
    config: AttentionConfig, group: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    heads = (sum(config.slots), config.shape.kv_heads)
    parts = (
        config.max_units,
        config.max_parts,
        group,
        config.shape.head_dim + ATTENTION_PARTIAL_EXTRA,
    )
    return (*heads, *parts), (*heads, group + config.max_units)


def splitk_flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: torch.Tensor,
    lengths: torch.Tensor,
    config: AttentionConfig,
    workspace: Workspace,
    out: torch.Tensor,
    *,
    scale: float,
    rotations: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [B, Hq * D]: each slot's new token attends to its cache and itself, and is appended.

    q is [B, Hq, D], k and v are [B, Hkv, D], of a 16-bit dtype, their rows equally far apart;
    `caches` int64 [B] has the addresses of the slots (kv_blocks.py), which are in the order of the
    tiers, and `lengths` int32 [B] the positions that they hold, fewer than the shape's in whole
    blocks (the caller sees to it: they are on the device), or a negative number for a slot without
    a request, whose output stays as it is. Scores are q k^T times `scale`. With
    `rotations`, float32 [positions, D / 2, 2] of cosines and sines, q and k are first rotated to
    their positions (RoPE, halves as in Llama). With `pdl` the launch may start while the kernel
    before it ends: it then reads `caches`, `lengths` and what is cached, which no kernel that is
    still running may write.
    Raises ValueError where an operand does not fit the others.
    """
    _check_operands(q, k, v, caches, lengths, config, workspace, out, rotations)
    _check_gpu(q)
    kv_heads, dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    args = _Args(
        caches=caches.data_ptr(),
        lengths=lengths.data_ptr(),
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        rotations=0 if rotations is None else rotations.data_ptr(),
        out=out.data_ptr(),
        partials=workspace.partials.data_ptr(),
        arrivals=workspace.arrivals.data_ptr(),
        stride=q.stride(0),
        order=CtaOrder.of(config.ctas[0], sum(config.ctas) + config.idle),
        tier_count=len(config.slots),
        kv_heads=kv_heads,
        group=group,
        slot_blocks=config.shape.blocks,
        unit_blocks=config.unit_blocks,
        part_blocks=config.part_blocks,
        item_units=config.item_units,
        max_units=config.max_units,
        max_parts=config.max_parts,
        stages=config.stages,
        scale=scale * math.log2(math.e),
    )
    slot = cta = 0
    for number, count in enumerate(config.slots):
        spread = config.spread and number == 0
        step, heads = (_spread_step(count), 1) if spread else (1, kv_heads)
        args.tiers[number] = _Tier(slot, cta, config.windows[number], step, heads)
        slot += count
        cta += config.ctas[number]
    args.tiers[len(config.slots)] = _Tier(slot, cta)
    _kernel(q.dtype, dim, group, torch.cuda.current_device()).launch(
        cta + config.idle, _threads(group), args, shared_bytes=config.shared_bytes, pdl=pdl
    )
    return out


@functools.cache
def _spread_step(slots: int) -> int:
    """By which `slots` are gone through so that those of a tier, side by side, come evenly.

    The number next to the golden section of them that shares no divisor with them.
    """
    golden = slots * (math.sqrt(5) - 1) / 2
    steps = (step for step in range(1, slots) if math.gcd(step, slots) == 1)
    return min(steps, key=lambda step: abs(step - golden), default=1)


def _check_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: torch.Tensor,
    lengths: torch.Tensor,
    config: AttentionConfig,
    workspace: Workspace,
    out: torch.Tensor,
    rotations: torch.Tensor | None,
) -> None:
    slots, shape = sum(config.slots), config.shape
    heads, dim, device = shape.kv_heads, shape.head_dim, q.device
    if q.dtype not in DTYPES or q.dim() != 3 or q.shape[1] % heads:
        raise ValueError(f"expected q as [B, Hq, {dim}] in 16 bits, got {list(q.shape)}, {q.dtype}")
    group = q.shape[1] // heads
    wanted = {
        "q": (q, (slots, heads * group, dim), q.dtype),
        "k": (k, (slots, heads, dim), q.dtype),
        "v": (v, (slots, heads, dim), q.dtype),
        "out": (out, (slots, heads * group * dim), q.dtype),
        "caches": (caches, (slots,), torch.int64),
        "lengths": (lengths, (slots,), torch.int32),
    }
    for name, (tensor, size, dtype) in wanted.items():
        if tensor.shape != size or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"expected {name} as {list(size)} of {dtype} on {device}, got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
    if len({tensor.stride(0) for tensor in (q, k, v)}) > 1 or not all(
        tensor[0].is_contiguous() for tensor in (q, k, v)
    ):
        raise ValueError("expected rows of q, k and v that are contiguous and equally far apart")
    if (
        not out.is_contiguous()
        or not 1 <= group <= MAX_GROUP_HEADS
        or len(config.slots) > MAX_TIERS
    ):
        raise ValueError(
            f"expected a contiguous output, 1 to {MAX_GROUP_HEADS} query heads for a KV head and "
            f"at most {MAX_TIERS} tiers, got {group} and {len(config.slots)}"
        )
    if rotations is not None and (
        rotations.shape[1:] != (dim // 2, 2)
        or len(rotations) < shape.blocks * KV_BLOCK
        or rotations.dtype != torch.float32
        or not rotations.is_contiguous()
    ):
        raise ValueError(f"expected rotations for {shape}, got {list(rotations.shape)}")
    sizes = _workspace_sizes(config, group)
    if (workspace.partials.shape, workspace.arrivals.shape) != sizes:
        raise ValueError(f"expected a workspace of {list(sizes[0])} and {list(sizes[1])}")


def _check_gpu(q: torch.Tensor) -> None:
    if not q.is_cuda or q.device.index != torch.cuda.current_device():
        raise ValueError(f"expected q on the current GPU, got {q.device}")


def _threads(group: int) -> int:
    """Of a CTA: warps that attend, fewer where each has more heads to keep, and one that copies."""
    return 32 * ((ATTENTION_WARPS if group <= 8 else ATTENTION_WARPS_LARGE_GROUP) + 1)


def defines(dtype: torch.dtype, head_dim: int, group: int) -> dict[str, int]:
    """The macros of one variant of the kernel."""
    return {
        "BFLOAT16": int(dtype == torch.bfloat16),
        "HEAD_DIM": head_dim,
        "GROUP_TILES": ceil_div(group, 8),
    }


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int, group: int, device: int) -> Kernel:
    del device  # a kernel is loaded on one
    return kernel(SOURCE, "splitk_flash_attn", defines(dtype, head_dim, group))
