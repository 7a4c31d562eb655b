"""What `dakrun bench --kernel attention` is asked to measure: batches of slots, remote shares.

Knows how users write them; needs no GPU and no torch.
"""

import random
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

    `heads` query heads attend to the keys and values of `kv_heads`, evenly shared. Where there is a
    `shortest`, slots are of different lengths, up to `length`.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    shortest: int | None = None

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.kv_heads, *self._range) < 1:
            raise UsageError(f"a case of {self} is empty", hint=f"all are at least 1, {AS_IN}")
        if self.heads % self.kv_heads or self.heads > MAX_GROUP * self.kv_heads:
            raise UsageError(
                f"a case of {self}: {self.heads} query heads for {self.kv_heads} KV heads",
                hint=f"the kernel takes 1 to {MAX_GROUP} for each, {AS_IN}",
            )
        if self._range[0] > self.length:
            raise UsageError(
                f"a case of {self}: no length is that long and that short",
                hint="write the shortest first, as in --case 64:32/8:1-8192",
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The positions of each slot: between the shortest and `length` all are as likely.

        They are the same each time.
        """
        draw = random.Random(0)
        return tuple(draw.randint(*self._range) for _ in range(self.batch))

    @property
    def _range(self) -> tuple[int, int]:
        return (self.length if self.shortest is None else self.shortest, self.length)

    def __str__(self) -> str:
        lengths = str(self.length) if self.shortest is None else f"{self.shortest}-{self.length}"
        return f"{self.batch}:{self.heads}/{self.kv_heads}:{lengths}"


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
    """The slots in a text such as "64:32/8:2048" or "64:32/8:1-8192"; else UsageError."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)/([0-9]+):(?:([0-9]+)-)?([0-9]+)", text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a case BATCH:HEADS/KV_HEADS:[SHORTEST-]LENGTH",
            hint=f"write slots, query heads, KV heads and positions, {AS_IN}",
        )
    *sizes, shortest, length = match.groups()
    batch, heads, kv_heads = map(int, sizes)
    return Slots(batch, heads, kv_heads, int(length), int(shortest) if shortest else None)
