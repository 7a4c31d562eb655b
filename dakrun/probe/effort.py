"""How much a GPU is measured with: buffers, rings and the points of the sweeps.

Pure choices; needs no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.errors import CannotRun
from dakrun.hardware.profile import LOCAL
from dakrun.units import format_bytes

KIB, MIB = 2**10, 2**20
MIN_BYTES = 256 * MIB  # of a buffer: less says more of L2 than of memory

Ring = tuple[int, int]  # bytes of a chunk, stages


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure: bytes of the buffers, seconds of a reading, readings of a figure.

    `l2_bytes` are those of sets that L2 may keep, `windows` bytes in flight and `sms` numbers of
    SMs of the congestion grid, `rows` those of X that kernels are measured with, `many_rows` those
    that are too many for SplitK_GEMM, and `slots` those of attention and sampling.
    """

    hbm_bytes: int
    host_bytes: int
    peer_bytes: int
    seconds: float
    runs: int
    hbm_rings: tuple[Ring, ...]
    l2_bytes: tuple[int, ...]
    remote_rings: tuple[Ring, ...]
    windows: tuple[int, ...]
    sms: tuple[int, ...]
    op_bytes: tuple[int, ...]
    rows: tuple[int, ...]
    many_rows: tuple[int, ...]
    slots: tuple[int, ...]
    batch_sizes: tuple[int, ...]


FULL = Effort(
    hbm_bytes=8 * 2**30,
    host_bytes=4 * 2**30,
    peer_bytes=4 * 2**30,
    seconds=0.02,
    runs=5,
    hbm_rings=((4 * KIB, 8), (8 * KIB, 8), (16 * KIB, 4), (16 * KIB, 8), (16 * KIB, 12),
               (32 * KIB, 6)),
    l2_bytes=tuple(n * MIB for n in (4, 16, 24, 32, 64, 256)),
    remote_rings=((2 * KIB, 2), (4 * KIB, 4), (8 * KIB, 4), (8 * KIB, 8), (16 * KIB, 8)),
    windows=tuple(2**i for i in range(15, 24)),
    sms=(1, 2, 4, 8, 16, 32, 64),
    op_bytes=tuple(n * MIB for n in (4, 8, 32, 64, 128, 256, 512)),
    rows=(8, 16, 32, 64),
    many_rows=(128, 256, 512, 1024, 2048, 4096),
    slots=(8, 64, 512),
    batch_sizes=tuple(2**i for i in range(3, 13)),
)  # fmt: skip
QUICK = Effort(
    hbm_bytes=2 * 2**30,
    host_bytes=2**29,
    peer_bytes=2**30,
    seconds=0.006,
    runs=3,
    hbm_rings=((16 * KIB, 8), (16 * KIB, 12), (32 * KIB, 6)),
    l2_bytes=(),
    remote_rings=((8 * KIB, 4), (16 * KIB, 8)),
    windows=tuple(2**i for i in range(17, 23)),
    sms=(2, 4, 8, 16, 32),
    op_bytes=tuple(n * MIB for n in (8, 32, 128, 256)),
    rows=(8, 64),
    many_rows=(128, 1024),
    slots=(8, 512),
    batch_sizes=(8, 64, 512, 2048),
)


def ring_for(per_cta: int) -> Ring | None:
    """A ring that keeps `per_cta` bytes, a power of two, in flight; None where none can."""
    chunk = min(max(per_cta // 4, KIB), 16 * KIB)
    stages = per_cta // chunk
    return (chunk, stages) if 2 <= stages <= 8 else None


def buffer_sizes(
    effort: Effort, free: int, host_memory: int, peers: Sequence[int]
) -> dict[str, int]:
    """Bytes of the buffers by tier, whole MiB, where `free` and `host_memory` bytes can be had.

    Raises CannotRun where they are too small to measure with.
    """
    sizes = {
        LOCAL: min(effort.hbm_bytes, free // 2),
        "host": min(effort.host_bytes, host_memory // 4),
        **{f"peer:{gpu}": effort.peer_bytes for gpu in peers},
    }
    for tier, size in sizes.items():
        if size < MIN_BYTES:
            raise CannotRun(
                f"measuring takes {format_bytes(MIN_BYTES)} of {tier} memory at least, "
                f"{format_bytes(size)} can be had",
                hint="end what else uses it, or plan with a shipped profile",
            )
    return {tier: size // MIB * MIB for tier, size in sizes.items()}
