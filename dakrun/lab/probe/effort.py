"""Sizes, points and repetitions for measuring a GPU; cpu.py has a CPU's. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dakrun.errors import CannotRun
from dakrun.hardware import LOCAL
from dakrun.lab.ceilings import GIB, KIB, MIB, Ring
from dakrun.units import format_bytes

MIN_BYTES = 256 * MIB  # minimum size of a buffer; a smaller one would measure L2


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes, points and repetitions for measuring a GPU.

    `*_bytes` of tiers are buffer sizes; a reading takes `seconds`, a figure `runs` readings.
    `l2_bytes` are working sets around the size of L2. The congestion grid has `windows` (bytes in
    flight) and `sms`. `op_bytes` are sizes of ops in chains. `rows` of X are measured with
    SplitK_GEMM, `many_rows` with the kernel for more rows, `slots` with attention and sampling,
    `batch_sizes` with cuBLAS.
    """

    seconds: float
    runs: int
    hbm_bytes: int
    hbm_rings: tuple[Ring, ...]
    l2_bytes: tuple[int, ...]
    host_bytes: int
    peer_bytes: int
    remote_rings: tuple[Ring, ...]
    windows: tuple[int, ...]
    sms: tuple[int, ...]
    op_bytes: tuple[int, ...]
    rows: tuple[int, ...]
    many_rows: tuple[int, ...]
    slots: tuple[int, ...]
    batch_sizes: tuple[int, ...]


SIZES: dict[str, Any] = {  # in full, and quickly
    "seconds": (0.02, 0.006),
    "runs": (5, 3),
    "hbm_bytes": (8 * GIB, 2 * GIB),
    "hbm_rings": (
        ((4 * KIB, 8), (8 * KIB, 8), (16 * KIB, 4), (16 * KIB, 8), (16 * KIB, 12), (32 * KIB, 6)),
        ((16 * KIB, 8), (16 * KIB, 12), (32 * KIB, 6)),
    ),
    "l2_bytes": (tuple(n * MIB for n in (4, 16, 24, 32, 64, 256)), ()),
    "host_bytes": (4 * GIB, GIB // 2),
    "peer_bytes": (4 * GIB, GIB),
    "remote_rings": (
        ((2 * KIB, 2), (4 * KIB, 4), (8 * KIB, 4), (8 * KIB, 8), (16 * KIB, 8)),
        ((8 * KIB, 4), (16 * KIB, 8)),
    ),
    "windows": (tuple(2**i for i in range(15, 24)), tuple(2**i for i in range(17, 23))),
    "sms": ((1, 2, 4, 8, 16, 32, 64), (2, 4, 8, 16, 32)),
    "op_bytes": tuple(
        tuple(n * MIB for n in of) for of in ((4, 8, 32, 64, 128, 256, 512), (8, 32, 128, 256))
    ),
    "rows": ((8, 16, 32, 64), (8, 64)),
    "many_rows": ((128, 256, 512, 1024, 2048, 4096), (128, 512, 2048)),
    "slots": ((8, 64, 512), (8, 512)),
    "batch_sizes": (tuple(2**i for i in range(3, 13)), (8, 64, 512, 2048)),
}
FULL, QUICK = (Effort(**{name: of[quick] for name, of in SIZES.items()}) for quick in (0, 1))


def buffer_sizes(
    effort: Effort, free: int, host_memory: int, peers: Sequence[int]
) -> dict[str, int]:
    """Bytes of the buffers by tier, in whole MiB; `free` GPU and `host_memory` bytes are available.

    Raises CannotRun if one is smaller than MIN_BYTES.
    """
    sizes = {
        LOCAL: min(effort.hbm_bytes, free // 2),
        "host": min(effort.host_bytes, host_memory // 4),
        **{f"peer:{gpu}": effort.peer_bytes for gpu in peers},
    }
    for tier, size in sizes.items():
        if size < MIN_BYTES:
            raise CannotRun(
                f"measuring needs at least {format_bytes(MIN_BYTES)} of {tier} memory, "
                f"{format_bytes(size)} are available",
                hint="end other programs that use it, or plan with a shipped profile",
            )
    return {tier: size // MIB * MIB for tier, size in sizes.items()}
