"""The search for stop strings in generated tokens."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice

from dakrun.requests.thoughts import Thought

Decode = Callable[[Sequence[int]], str]

# Maximum UTF-8 bytes of a character, which may be spread over as many tokens.
CHARACTER_BYTES = 4
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Finds any of the strings `stop` in generated tokens; `decode` turns tokens into text.

    They are not searched in the `thought` that the text may begin with, nor in its first `after`
    tokens.
    """

    def __init__(
        self,
        stop: tuple[str, ...],
        decode: Decode,
        thought: Thought | None = None,
        after: int = 0,
    ) -> None:
        self._stop, self._decode, self._thought = stop, decode, thought
        self._after, self._skipped = after, 0  # tokens, and their characters once they are there
        # Finds the thought's end; None once the text is behind it, or has none.
        self._end = StopStrings((thought.markers.close,), decode) if stop and thought else None
        self._begun = thought is not None and thought.begun
        longest = max((len(s.encode("utf-8", "surrogatepass")) for s in stop), default=0)
        self._window = longest + CHARACTER_BYTES
        # Decoded twice, because decoding drops a leading space.
        self._has_text = cache(lambda token: decode([token, token]) != "")

    def hit(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest of `token_ids` completes a stop string. Call it after each token.

        A token with text is at least one byte. So it is enough to
        decode the last tokens, one per byte of the longest stop string and of one more character.
        All tokens are decoded to confirm a hit.
        """
        if not self._stop or self._is_thinking(token_ids) or len(token_ids) <= self._after:
            return False
        if self._after and not self._skipped:
            self._skipped = len(self._decode(token_ids[: self._after]))
        new = islice(reversed(token_ids), len(token_ids) - self._after)
        last = list(islice(filter(self._has_text, new), self._window))[::-1]
        for start in range(CHARACTER_BYTES):  # one of these starts at the start of a character
            text = self._decode(last[start:])
            if any(s in text for s in self._stop):
                whole = self._decode(token_ids)
                return self.cut(whole) != whole
            if not text.startswith(_REPLACEMENT):
                break
        return False

    def _is_thinking(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest token is in the thought, or may be, or ends it."""
        if self._end is None or self._thought is None:
            return False
        if not self._begun:
            start, marker = self._decode(token_ids).lstrip(), self._thought.markers.open
            self._begun = start.startswith(marker)
            if not self._begun and not marker.startswith(start):
                self._end = None
                return False
        if self._end.hit(token_ids):
            self._end = None
        return True

    def cut(self, text: str) -> str:
        """`text` up to the first stop string in it, or all of it."""
        start = max(self._skipped, self._thought.end(text) if self._thought else 0)
        found = (at for s in self._stop if (at := text.find(s, start)) >= 0)
        return text[: min(found, default=None)]
