"""What `dakrun bench --kernel attention` is asked to measure: batches of slots, remote shares.

Knows how users write them; needs no GPU and no torch.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dakrun.bench.sweep import BenchDtype, Sweep, parse_ratios
from dakrun.errors import UsageError

MAX_GROUP = 16  # query heads of a KV head that the kernel takes
HEAD_DIMS = (64, 80, 96, 128)  # that there are kernels for
AS_IN = "as in --case 64:32/8:2048"


@dataclass(frozen=True)
class Slots:
    """`batch` slots, in each of which a new token is the last of `length` positions.

    `heads` query heads attend to the keys and values of `kv_heads`, evenly shared.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.kv_heads, self.length) < 1:
            raise UsageError(f"a case of {self} is empty", hint=f"all are at least 1, {AS_IN}")
        if self.heads % self.kv_heads or self.heads > MAX_GROUP * self.kv_heads:
            raise UsageError(
                f"a case of {self}: {self.heads} query heads for {self.kv_heads} KV heads",
                hint=f"the kernel takes 1 to {MAX_GROUP} for each, {AS_IN}",
            )

    def __str__(self) -> str:
        return f"{self.batch}:{self.heads}/{self.kv_heads}:{self.length}"


# Few and many slots; OPT-30B's heads, Llama's with and without groups; from a block to long ones.
DEFAULT_SLOTS = (
    *(Slots(8, 56, 56, 1056), Slots(128, 56, 56, 544), Slots(512, 32, 32, 512)),
    *(Slots(64, 32, 8, 2048), Slots(64, 32, 8, 8192), Slots(16, 64, 8, 8192)),
    *(Slots(1, 32, 8, 131_072), Slots(2, 64, 8, 65_536)),
    *(Slots(512, 32, 32, 64), Slots(8, 56, 56, 64)),
)


@dataclass(frozen=True, kw_only=True)
class AttentionSweep(Sweep):
    """All `slots` with every remote share."""

    slots: tuple[Slots, ...]
    head_dim: int


def attention_sweep(
    *,
    cases: Iterable[str],
    head_dim: str,
    ratios: Iterable[str],
    remote: str,
    dtype: BenchDtype,
) -> AttentionSweep:
    """What the command line asks for: its cases, or else DEFAULT_SLOTS.

    Raises UsageError where something of it is malformed.
    """
    return AttentionSweep(
        slots=tuple(dict.fromkeys(map(parse_slots, cases))) or DEFAULT_SLOTS,
        head_dim=int(head_dim),
        ratios=parse_ratios(ratios),
        remote=remote,
        dtype=dtype,
    )


def parse_slots(text: str) -> Slots:
    """The slots in a text such as "64:32/8:2048"; UsageError for anything else."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)/([0-9]+):([0-9]+)", text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a case BATCH:HEADS/KV_HEADS:LENGTH",
            hint=f"write slots, query heads, KV heads and positions, {AS_IN}",
        )
    return Slots(*map(int, match.groups()))
