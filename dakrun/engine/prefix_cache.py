"""The prefix cache of a tier: KV blocks that are found by name, and how many slots have each.

A name is a hash: equal names mean equal tokens in the block and in all before it. Knows numbers of
blocks and their names, neither memory nor slots.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence

from dakrun.geometry import KV_BLOCK

NAME_BYTES = 16  # 128 bits: two of 10^9 blocks share a name with a probability of 10^-21


def block_names(tokens: Sequence[int]) -> list[bytes]:
    """The names of the full blocks of `tokens`, in order.

    A name is the BLAKE2b hash of the name before it and of the block's tokens.
    """
    data = memoryview(array("q", tokens)).cast("B")
    size = 8 * KV_BLOCK
    names, name = [], b""
    for start in range(0, len(data) - size + 1, size):
        name = hashlib.blake2b(name + data[start : start + size], digest_size=NAME_BYTES).digest()
        names.append(name)
    return names


class PrefixCache:
    """The named blocks of a tier: `references` counts the slots that have a block, by its number.

    `borrowers` counts those of them that did not fill it. `cached` are the named blocks that no
    slot has, the one to be evicted first in front.
    """

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()
        self.borrowers: Counter[int] = Counter()
        self.cached: dict[int, None] = {}
        self._blocks: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def find(self, name: bytes) -> int | None:
        """The block of that name."""
        return self._blocks.get(name)

    def name(self, block: int, name: bytes) -> None:
        """Name `block`, unless another one has the name."""
        if self._blocks.setdefault(name, block) == block:
            self._names[block] = name

    def lend(self, block: int) -> None:
        """One more slot has a named block."""
        self.cached.pop(block, None)
        self.references[block] += 1
        self.borrowers[block] += 1

    def end_loan(self, block: int) -> None:
        """One slot fewer has the block by a loan; its use ends with drop()."""
        self.borrowers[block] -= 1
        if not self.borrowers[block]:
            del self.borrowers[block]

    def drop(self, block: int) -> bool:
        """One slot fewer has `block`. Returns whether it is free now: neither cached nor used."""
        self.references[block] -= 1
        if self.references[block]:
            return False
        del self.references[block]
        if block in self._names:
            self.cached[block] = None
            return False
        return True

    def evict(self) -> int:
        """The oldest cached block, which has no name any more."""
        block = next(iter(self.cached))
        del self.cached[block]
        del self._blocks[self._names.pop(block)]
        return block
