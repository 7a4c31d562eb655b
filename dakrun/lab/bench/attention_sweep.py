"""`dakrun bench --kernel attention`: batches of slots and offload ratios, and their cases.

Parses the command line's values; needs no GPU and no torch.
"""

import itertools
import random
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dakrun.config import DTYPE_BYTES
from dakrun.errors import UsageError
from dakrun.formats import KVLayout
from dakrun.geometry import KV_BLOCK, MAX_GROUP_HEADS
from dakrun.lab.bench.ceilings import Effort
from dakrun.lab.bench.sweep import BenchDtype, Case, Sweep, parse_ratios, units_by_tier
from dakrun.plan import Op, attention_op
from dakrun.units import ceil_div

EXAMPLE = "as in --case 64:32/8:2048"


@dataclass(frozen=True)
class Slots:
    """`batch` slots of `length` positions each, the last of which is a new token.

    `heads` query heads attend to `kv_heads` KV heads in equal groups. With `shortest`, the slots'
    lengths are drawn uniformly from `shortest` to `length`.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    shortest: int | None = None

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.kv_heads, *self._range) < 1:
            raise UsageError(
                f"a case of {self} is empty", hint=f"all numbers are at least 1, {EXAMPLE}"
            )
        if self.heads % self.kv_heads or self.heads > MAX_GROUP_HEADS * self.kv_heads:
            raise UsageError(
                f"a case of {self}: {self.heads} query heads for {self.kv_heads} KV heads",
                hint=f"the kernel supports 1 to {MAX_GROUP_HEADS} for each, {EXAMPLE}",
            )
        if self._range[0] > self.length:
            raise UsageError(
                f"a case of {self}: the shortest length is above the longest",
                hint="write the shortest first, as in --case 64:32/8:1-8192",
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each slot; drawn with a fixed seed."""
        draw = random.Random(0)
        return tuple(draw.randint(*self._range) for _ in range(self.batch))

    @property
    def blocks(self) -> int:
        """KV blocks of a slot of `length` positions."""
        return ceil_div(self.length, KV_BLOCK)

    @property
    def _range(self) -> tuple[int, int]:
        return (self.length if self.shortest is None else self.shortest, self.length)

    def __str__(self) -> str:
        lengths = str(self.length) if self.shortest is None else f"{self.shortest}-{self.length}"
        return f"{self.batch}:{self.heads}/{self.kv_heads}:{lengths}"


# Few and many slots; OPT-30B's heads, Llama's with and without groups; one block to long contexts.
DEFAULT_SLOTS = (
    *(Slots(8, 56, 56, 1056), Slots(128, 56, 56, 544), Slots(512, 32, 32, 512)),
    *(Slots(64, 32, 8, 2048), Slots(64, 32, 8, 8192), Slots(16, 64, 8, 8192)),
    *(Slots(1, 32, 8, 131_072), Slots(2, 64, 8, 65_536)),
    *(Slots(512, 32, 32, 64), Slots(8, 56, 56, 64)),
)


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """One decode step of `slots`; the units are slots, each with room for the longest."""

    slots: Slots
    head_dim: int

    @property
    def label(self) -> str:
        return str(self.slots)

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Bytes of KV that a launch reads from each tier, the new tokens' included."""
        position = self.unit_bytes // (self.slots.blocks * KV_BLOCK)
        lengths = iter(self.slots.lengths)
        return tuple(position * sum(itertools.islice(lengths, count)) for count in self.units)

    def op(self, dtype: BenchDtype) -> Op:
        """The planner's op, for slots of the mean length; its bytes have no padding."""
        slots = self.slots
        return attention_op(
            slots.heads,
            KVLayout(slots.kv_heads, self.head_dim, DTYPE_BYTES[dtype]),
            n=slots.batch,
            length=statistics.fmean(slots.lengths),
            positions=slots.blocks * KV_BLOCK,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionSweep(Sweep):
    """All `slots` with every offload ratio."""

    kernel = "attention"
    operand = "KV"
    slots: tuple[Slots, ...]
    head_dim: int

    def cases(self, turning_point: float, effort: Effort, *, tiers: int) -> Iterator[AttentionCase]:
        """The cases by batch of slots and ratio."""
        for slots, requested in itertools.product(self.slots, self.ratios):
            once = AttentionCase(
                slots=slots,
                head_dim=self.head_dim,
                requested=requested,
                units=units_by_tier(slots.batch, requested, turning_point, tiers=tiers),
                unit_bytes=slot_bytes(slots, self.head_dim, self.dtype),
                launches=1,
            )
            yield replace(once, launches=effort.launches(once.read_bytes))


def slot_bytes(slots: Slots, head_dim: int, dtype: BenchDtype) -> int:
    """Bytes of a slot: keys and values of whole blocks, the new token's included."""
    blocks = slots.kv_heads * slots.blocks
    return blocks * 2 * KV_BLOCK * head_dim * DTYPE_BYTES[dtype]


def attention_sweep(
    *,
    cases: Iterable[str],
    head_dim: str,
    ratios: Iterable[str],
    remote: str,
    dtype: BenchDtype,
) -> AttentionSweep:
    """The sweep of the command line's options: its cases, or DEFAULT_SLOTS.

    Raises UsageError if an option is malformed.
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
            hint=f"write slots, query heads, KV heads and positions, {EXAMPLE}",
        )
    *sizes, shortest, length = match.groups()
    batch, heads, kv_heads = map(int, sizes)
    return Slots(batch, heads, kv_heads, int(length), int(shortest) if shortest else None)
