"""Sets of row ids in a few bytes each, however long the ids are.

Knows hashes of 64 bits only: among a million ids two agree with a probability of 3e-8.
"""

import hashlib
from array import array


class IdSet:
    """A set of strings that keeps 12 to 24 bytes for each: an open-addressing table of hashes."""

    def __init__(self) -> None:
        self._table = _empty(1 << 10)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, id: str) -> bool:
        return self._table[self._slot(_hash(id))] != 0

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes."""
        return len(self._table) * self._table.itemsize

    def add(self, id: str) -> bool:
        """Put `id` into the set; whether it was not there before."""
        value = _hash(id)
        slot = self._slot(value)
        if self._table[slot]:
            return False
        self._table[slot] = value
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            self._grow()
        return True

    def _slot(self, value: int) -> int:
        """Where `value` is, or the free slot where it would be."""
        table, mask = self._table, len(self._table) - 1
        slot = value & mask
        while table[slot] not in (0, value):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old, self._table = self._table, _empty(2 * len(self._table))
        for value in old:
            if value:
                self._table[self._slot(value)] = value


def _empty(slots: int) -> "array[int]":
    return array("Q", [0]) * slots


def _hash(id: str) -> int:
    """64 bits that are never 0, which marks a free slot."""
    data = id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1
