"""Drafts of the rows of a step, on the CPU: from each row's own text, and from the file's index."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dakrun.drafts.common_token import CommonToken
from dakrun.drafts.draft_lengths import LEAST_CHANCE, DraftLengths
from dakrun.drafts.file_index import FileIndex
from dakrun.drafts.suffix import continuation, longest_match
from dakrun.geometry import LONGEST_MATCH


class Draft(NamedTuple):
    """Drafted tokens, and the length of the match that they come from; 0 without a match."""

    tokens: Sequence[int] = ()
    match: int = 0


class _Text:
    """The tokens of a slot, in memory that grows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.empty(2 * len(tokens) + 64, dtype=np.int32)
        self._size = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        if self._size + len(tokens) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * (self._size + len(tokens)))
        self._tokens[self._size : self._size + len(tokens)] = tokens
        self._size += len(tokens)

    @property
    def all(self) -> np.ndarray:
        return self._tokens[: self._size]


class Drafter:
    """Proposes up to `most` tokens for each of `slots` slots; see DraftLengths for `cost`."""

    def __init__(self, slots: int, most: int, cost: float = LEAST_CHANCE) -> None:
        self.lengths, self._common = DraftLengths(most, cost), CommonToken()
        self._index = FileIndex(slots)
        self._texts: dict[int, _Text] = {}
        self._drafts: dict[int, Draft] = {}

    def begin(self, slot: int, text: Sequence[int]) -> None:
        """Let the request in `slot` have the tokens `text` so far."""
        self._texts[slot] = _Text(text)
        self._index.begin(slot, text)
        self._drafts.pop(slot, None)

    def propose(
        self, slots: Sequence[int], most: Sequence[int], forced: Mapping[int, Sequence[int]]
    ) -> list[Sequence[int]]:
        """Tokens that may be the next ones of each of `slots`, up to `most` of each.

        Those that a grammar has `forced`, by slot; else those behind a match of the slot's own
        text; or those of the file's index, if it knows a longer end of the text, by two tokens at
        least if the match has two or more. If neither knows any end, a common token, and what the
        index knows behind it.
        """
        found = list[Sequence[int]]()
        common = self._common.token
        matches, of_file = self._index.propose(slots, self.lengths.most, common)
        for slot, limit, match, row in zip(slots, most, matches.tolist(), of_file, strict=True):
            if forced.get(slot):
                found.append(forced[slot][:limit])
                self._drafts[slot] = Draft(found[-1], LONGEST_MATCH)
                continue
            text = self._texts[slot].all
            own, match_end = longest_match(text)
            by_index = match > own + (own > 1) or not own
            used = min(LONGEST_MATCH, match if by_index else own)
            length = min(limit, self.lengths.by_match[used])
            if by_index:
                known = row[:length].tolist()
                tokens = known[: known.index(-1)] if -1 in known else known
            else:
                tokens = continuation(text, match_end, length)
            self._drafts[slot] = Draft(tokens, used)
            found.append(tokens)
        return found

    def learn(self, slots: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Take the tokens that were accepted for each of `slots` in the step of its last draft."""
        drafts = [self._drafts.pop(slot, Draft()) for slot in slots]
        matches = [draft.match for draft in drafts]
        self._common.learn(matches, accepted)
        self.lengths.learn(
            matches,
            [len(draft.tokens) for draft in drafts],
            [max(0, len(tokens) - 1) for tokens in accepted],
        )
        for slot, tokens in zip(slots, accepted, strict=True):
            self._texts[slot].extend(tokens)
        self._index.extend(slots, accepted)
