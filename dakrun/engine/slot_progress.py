"""Progress of the requests in slots, at the ends of steps with drafts.

The host's side of native/accept_drafts.cu: it reads the logs that the GPU writes. Works on all rows
of a step together. Knows rows and slots, no GPU.
"""

from collections.abc import Sequence

import numpy as np

from dakrun.engine.step import Row, Sampling
from dakrun.kernels.draft_tokens import outcomes

Entries = np.ndarray  # int32 [slots, depth]: entry p % depth is of the step that began at p


class SlotProgress:
    """The request and the cached positions of each slot, from logs of `tokens` and `outcomes`.

    Entry p % depth of `tokens` is the token that was chosen behind position p; that of `outcomes`
    is the Outcome of the row that began at p.
    """

    def __init__(self, tokens: Entries, outcomes: Entries) -> None:
        self._tokens, self._outcomes = tokens, outcomes
        self._owners: list[Sampling | None] = [None] * len(tokens)
        self.cached = np.zeros(len(tokens), dtype=np.int64)
        self._ends = np.zeros(len(tokens), dtype=np.int64)

    def begin(self, row: Row, cached: int) -> None:
        """Let the slot of `row` be its request's, with `cached` positions."""
        self._owners[row.slot] = row.sampling
        self.cached[row.slot], self._ends[row.slot] = cached, end_of(row)

    def take(self, rows: Sequence[Row]) -> tuple[list[list[int]], list[int], list[int]]:
        """The accepted tokens, numbers of drafts, and lengths of matches of a step's decode `rows`.

        A row has no tokens if its request was at its end, or if its slot is another request's now.
        """
        slots = np.fromiter((row.slot for row in rows), dtype=np.int64, count=len(rows))
        own = [self._owners[row.slot] is row.sampling for row in rows]
        starts, depth = self.cached[slots], self._tokens.shape[1]
        runs = np.array(own, dtype=bool) & (starts < self._ends[slots])
        packed = self._outcomes[slots, starts % depth]
        accepted, drafted, matches = outcomes(np.where(runs, packed, 0))
        self.cached[slots] = starts + accepted
        entries = (starts[:, None] + np.arange(accepted.max(initial=0))) % depth
        found = self._tokens[slots[:, None], entries].tolist()
        counts = accepted.tolist()
        tokens = [own[:count] for own, count in zip(found, counts, strict=True)]
        return tokens, drafted.tolist(), matches.tolist()


def end_of(row: Row) -> int:
    """Positions in the KV cache at the end of a row's request, at most: all but its last token."""
    return len(row.sampling.history.prompt) + max(1, row.sampling.limit) - 1
