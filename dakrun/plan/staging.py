"""Staging buffers of a plan: their size, and when the copies into them begin.

engine/staging.py has these buffers and makes the copies.
"""

from collections.abc import Iterable, Sequence

from dakrun.config import Dtype
from dakrun.hardware import HardwareProfile
from dakrun.plan.placed_op import PlacedOp
from dakrun.plan.plan import PrefillPlan
from dakrun.plan.roofline import STAGED_TOGETHER, Links, compute_time

SPARE_BYTES, MOST_SPARE = 64 << 20, 8  # room in HBM for experts that move: one, or more up to these
RING_GROUPS = 4  # groups of small parts for which the staging buffers have room
PART_ROUNDING = 8192  # bytes for the alignment of a part's arrays


def staging_bytes(
    ops: Sequence[PlacedOp], prefill: PrefillPlan, machine: HardwareProfile,
    remote: Sequence[str], dtype: Dtype,
) -> int:  # fmt: skip
    """Bytes of the local tier's buffers for the staged parts of `ops`.

    Decode steps stage the ops of that transport, prompts what `prefill` stages in passes of its
    tokens. Both use the same buffers. Where experts are in several tiers, there is room for some
    more (spare_experts), since they are exchanged.
    """
    staged, expert = list[PlacedOp](), 0  # bytes
    for op in ops:
        if op.op.chances and op.remote_bytes:
            expert += op.op.resident_bytes // len(op.op.chances)
        one = op.op.with_rows(prefill.chunk_tokens) if op.op.chances else op.op
        if op.transport == "staged" or prefill.stages(one, op.shares[0]):
            staged.append(op)
    total = sum(op.remote_bytes for op in staged)
    largest = max((op.largest_remote_part for op in staged), default=0)
    ahead = bytes_ahead(ops, machine, remote, dtype)
    return ring_bytes(largest, total, ahead) + spare_experts(expert) * expert


def spare_experts(nbytes: int) -> int:
    """Further experts of `nbytes` each that HBM has room for: so many move there at a time."""
    return max(1, min(MOST_SPARE, SPARE_BYTES // nbytes)) if nbytes else 0


def ring_bytes(largest: int, total: int, ahead: int = 0) -> int:
    """Bytes of the buffers for staged parts of `total` bytes, of which one has at most `largest`.

    There is room for `ahead` bytes (see bytes_ahead), for two of the largest, or, of small parts,
    for RING_GROUPS groups of up to STAGED_TOGETHER bytes, but for half of all parts at most.
    """
    return min(total, max(2 * largest, ahead, min(total // 2, RING_GROUPS * STAGED_TOGETHER)))


def bytes_ahead(
    ops: Iterable[PlacedOp], machine: HardwareProfile, remote: Sequence[str], dtype: Dtype
) -> int:
    """Bytes of what two layers stage, if copies are held back from attention; 0 if they are not.

    Attention that reads a link itself would share it with copies that begin ahead of it, while the
    products behind it leave the link to copies. So those of a whole layer begin when attention of
    the layer before has ended, and the buffers hold two layers: what is in use, and what follows.

    Copies begin as there is room where attention reads no link that they use for more than half of
    its time, even at half of the link's rate; and where those of a layer take more than twice as
    long as its products, since the link then limits the step in any order. The tiers of `ops` are
    the local one and `remote`; `dtype` is the model's.
    """
    links, layer, products = Links.of(machine, remote), 0, 0.0
    direct, copied = list(links.direct.values()), list(links.staged.values())
    read, copies = [0.0] * len(direct), [0.0] * len(direct)  # seconds of a layer, by tier
    for op in ops:
        if op.op.category == "attention":
            read = [op.read_bytes(t) / op.op.layers / rate for t, rate in enumerate(direct)]
        elif op.op.in_layer:
            reading = op.op.read_bytes / direct[0]
            products += max(reading, compute_time(op.op, machine, dtype))
            if op.transport == "staged":
                layer += op.largest_remote_part + PART_ROUNDING
                for t in range(1, len(copied)):
                    copies[t] += op.read_bytes(t) / op.op.layers / copied[t]
    shares = any(2 * read[t] > read[0] for t, seconds in enumerate(copies) if t and seconds)
    return 2 * layer if shares and max(copies) <= 2 * products else 0
