"""How much a benchmark measures with: buffers, launches in a chain, repetitions.

Pure choices; needs no GPU.
"""

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
MAX_LAUNCHES = 16_384  # of a chain: of tiny operands there are no more


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure with.

    For the ceilings `hbm_bytes` and `remote_bytes` of random data are read, for `seconds` and
    `readings` times. A chain of launches reads an operand in each, different ones of more than
    `chain_bytes` in all and `least_launches` at least; it is replayed `replays` times.
    """

    hbm_bytes: int
    remote_bytes: int
    seconds: float
    readings: int
    chain_bytes: int
    least_launches: int
    replays: int

    def launches(self, operand_bytes: int) -> int:
        """Launches of a chain whose operands have `operand_bytes` each."""
        wanted = max(self.least_launches, self.chain_bytes // operand_bytes + 1)
        return min(wanted, MAX_LAUNCHES)


FULL = Effort(
    hbm_bytes=4 * GIB,
    remote_bytes=GIB,
    seconds=0.02,
    readings=5,
    chain_bytes=2 * GIB,
    least_launches=8,
    replays=7,
)
