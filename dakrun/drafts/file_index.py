"""An index, of bounded memory, of what followed the last few tokens in a run's answers so far.

For each context, the last tokens of a text, the index has the token that followed it last. Work is
done in numpy for all rows of a step together. A GPU's steps have an index of their own,
native/draft_index.cuh.
"""

from collections.abc import Sequence

import numpy as np

CONTEXTS = (1, 2, 3, 8)  # tokens of a context
ENTRIES = 1 << 20  # of 12 bytes
_NO_TOKEN = -1
_BASE = 0x9E3779B97F4A7C15  # of the hashes' polynomials, modulo 2^64
_LENGTHS = np.array(CONTEXTS)
_POWERS = np.array([pow(_BASE, n, 1 << 64) for n in CONTEXTS], dtype=np.uint64)


class FileIndex:
    """The index, and hashes of the ends of the texts in `slots` slots.

    The hash of a text is S = S of all but its last token * BASE + that token + 1, modulo 2^64, so
    that of its last n tokens follows from the S of n tokens before.
    """

    def __init__(self, slots: int, entries: int = ENTRIES) -> None:
        """`entries` is a power of two."""
        assert entries & (entries - 1) == 0, f"expected a power of two, got {entries}"
        # S at the last CONTEXTS[-1] + 1 positions of each text, the newest one last.
        self._sums = np.zeros((slots, CONTEXTS[-1] + 1), dtype=np.uint64)
        self._names = np.zeros(entries, dtype=np.uint64)
        self._tokens = np.full(entries, _NO_TOKEN, dtype=np.int32)
        self._shift = np.uint64(64 - entries.bit_length() + 1)

    def begin(self, slot: int, text: Sequence[int]) -> None:
        """Let the text of `slot` be `text`, none of which is indexed."""
        self._sums[slot] = 0
        last = np.array([text[-CONTEXTS[-1] :]], dtype=np.uint64)
        self._sums[[slot]] = self._grown(self._sums[[slot]], last)[:, -self._sums.shape[1] :]

    def extend(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Index the new `tokens` of each of `slots`, and add them to the texts."""
        if not len(slots):
            return
        counts = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        most, size = int(counts.max()), self._sums.shape[1]
        new = np.zeros((len(slots), most), dtype=np.uint64)
        placed = np.arange(most) < counts[:, None]
        new[placed] = [token for row in tokens for token in row]
        sums = self._grown(self._sums[slots], new)
        names = np.stack([self._hashes(sums[:, j : j + size]) for j in range(most)], axis=1)
        names, followed = names[placed], new[placed].astype(np.int32)
        entries = (names >> self._shift).astype(np.int64)
        self._names[entries], self._tokens[entries] = names, followed[:, None]
        self._sums[slots] = np.take_along_axis(sums, counts[:, None] + np.arange(size), axis=1)

    def propose(
        self, slots: Sequence[int], count: int, common: int = _NO_TOKEN
    ) -> tuple[np.ndarray, np.ndarray]:
        """Up to `count` tokens that may follow the text of each of `slots`.

        Returns the length of the longest context that is known, int64 [n], 0 if none is; and the
        tokens, int64 [n, count], negative from where nothing is known. Those of a text of which no
        context is known begin with `common`, if it is not negative.
        """
        sums, rows = self._sums[slots], np.arange(len(slots))
        lengths = np.zeros(len(slots), dtype=np.int64)
        tokens = np.full((len(slots), count), _NO_TOKEN, dtype=np.int64)
        for number in range(count):
            names = self._hashes(sums)
            entries = (names >> self._shift).astype(np.int64)
            known = self._names[entries] == names
            longest = known * np.arange(1, len(CONTEXTS) + 1)
            longest = longest.max(axis=1)
            found = np.flatnonzero(longest)
            if number == 0:
                lengths[found] = _LENGTHS[longest[found] - 1]
                if common >= 0:
                    found = rows
            if not len(found):
                break
            rows, longest = rows[found], longest[found]
            next_ones = self._tokens[entries[found, longest - 1]]
            next_ones = np.where(longest > 0, next_ones, np.int32(common))
            tokens[rows, number] = next_ones
            sums = self._grown(sums[found, 1:], next_ones[:, None].astype(np.uint64))
        return lengths, tokens

    def _grown(self, sums: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """`sums` [n, m], and those of `tokens` [n, k] behind them: uint64 [n, m + k]."""
        found = np.concatenate((sums, tokens), axis=1)
        for at in range(sums.shape[1], found.shape[1]):
            found[:, at] += found[:, at - 1] * np.uint64(_BASE) + np.uint64(1)
        return found

    def _hashes(self, sums: np.ndarray) -> np.ndarray:
        """Hashes, uint64 [n, contexts], of the contexts at the ends of texts with `sums`."""
        found = sums[:, -1:] - sums[:, -1 - _LENGTHS] * _POWERS
        found ^= found >> np.uint64(29)
        found *= np.uint64(0xBF58476D1CE4E5B9)
        return found | np.uint64(1)  # an empty entry has no such name
