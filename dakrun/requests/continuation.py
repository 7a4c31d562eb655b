"""The texts of generated tokens behind those of their prompt.

A token's text depends on its neighbours: a character may be spread over several tokens, and a
decoder may drop the space at the start of a text.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby

from dakrun.requests.stop_strings import CHARACTER_BYTES, Decode, StopStrings

# Tokens before a text that are decoded with it: more than a character's, for byte tokens.
CONTEXT = 8
_CONTEXTS = 8  # whose texts are kept
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Continuation:
    """Texts of tokens behind the tokens `context`, which are decoded with them.

    `special` has the names of special tokens, which a text omits. `decode` takes other tokens.
    """

    def __init__(
        self, decode: Decode, special: Mapping[int, str], context: Sequence[int] = ()
    ) -> None:
        self._special, self._context = special, list(context)
        self._decode = decode
        # StopStrings asks once a token, mostly with the same context.
        self._complete = lru_cache(_CONTEXTS)(partial(_complete_text, decode))

    def spelled(self, ids: Sequence[int]) -> str:
        """The text of `ids` with the names of special tokens."""
        return "".join(text for text, _ in self._runs(ids))

    def text(
        self,
        ids: Sequence[int],
        stop: StopStrings | None = None,
        *,
        keep: Collection[str] = (),
    ) -> str:
        """The text of `ids` up to the first stop string in `spelled`.

        It has no special tokens but those whose names are in `keep`.
        """
        runs = list(self._runs(ids))
        left = len("".join(text for text, _ in runs))
        if stop is not None:
            left = len(stop.cut("".join(text for text, _ in runs)))
        shown = []
        for text, is_special in runs:
            if not is_special or text in keep:
                shown.append(text[: max(left, 0)])
            left -= len(text)
        return "".join(shown)

    def offsets(self, ids: Sequence[int]) -> list[int]:
        """Where each token's text begins in the text of `ids`; that of a special token is empty.

        The tokens of one character begin where it begins.
        """
        ends, shown, context = [], 0, self._context
        pending: list[int] = []  # tokens of a character that is not complete
        for token in ids:
            ends.append(shown)
            if token in self._special:
                shown += len(self._behind(context, pending))
                context, pending = context_of(self._decode, [*context, *pending]), []
                continue
            pending.append(token)
            text = self._behind(context, pending)
            if not text.endswith(_REPLACEMENT) or len(pending) >= CHARACTER_BYTES:
                shown += len(text)
                context, pending = context_of(self._decode, [*context, *pending]), []
        return ends

    def _behind(self, context: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add to that of `context`, whose last character they may complete."""
        if not context:
            return self._decode(ids)
        count, before = self._complete(tuple(context))
        whole = self._decode([*context, *ids])
        if whole.startswith(before):
            return whole[len(before) :]
        pairs = enumerate(zip(before, whole, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), len(before))
        if at < len(before) and _REPLACEMENT in whole[at:]:
            # Byte tokens are decoded together: the incomplete last one spoils those of `context`.
            return self._decode([*context[count:], *ids])
        return whole[at:]

    def _runs(self, ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
        """Texts of runs of tokens, and whether each is of a special token."""
        context = self._context
        for is_special, tokens in groupby(ids, self._special.__contains__):
            run = list(tokens)
            if is_special:
                yield from ((self._special[token], True) for token in run)
            else:
                yield self._behind(context, run), False
                context = context_of(self._decode, [*context, *run[-CONTEXT - 1 :]])


def _complete_text(decode: Decode, ids: tuple[int, ...]) -> tuple[int, str]:
    """How many of `ids` `_complete` leaves, and their text."""
    complete = _complete(decode, ids)
    return len(complete), decode(complete)


def _complete(decode: Decode, ids: Sequence[int]) -> Sequence[int]:
    """`ids` without the first tokens of a character at their end."""
    if not decode(ids).endswith(_REPLACEMENT):
        return ids
    ends = range(len(ids), max(0, len(ids) - CHARACTER_BYTES), -1)
    return ids[: min(ends, key=lambda end: decode(ids[:end]).count(_REPLACEMENT))]


def context_of(decode: Decode, ids: Sequence[int]) -> list[int]:
    """The last of `ids`, up to CONTEXT, from the start of a character on.

    Byte tokens of a tokenizer like Llama 2's are decoded together, and none of them if the first is
    not the first of a character.
    """
    last = list(ids[-CONTEXT:])
    if len(ids) <= CONTEXT or _REPLACEMENT not in decode(last):
        return last
    starts = range(CHARACTER_BYTES)
    lost = [decode(_complete(decode, last[at:])).count(_REPLACEMENT) for at in starts]
    return last[lost.index(min(lost)) :]
