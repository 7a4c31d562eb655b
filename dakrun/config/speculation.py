"""Whether steps carry drafts, and how many tokens each: what a user asks for."""

from dataclasses import dataclass
from typing import Literal

from dakrun.errors import UsageError

MAX_DRAFT = 31  # drafted tokens of a row in a step: with the newest one, 32 positions


@dataclass(frozen=True)
class Speculation:
    """Drafts of up to `most` tokens a row: never ("off"), always, or where they save time.

    With `fewer`, they are as many as the plan predicts to be best for a step's number of rows.
    """

    mode: Literal["auto", "off", "suffix"] = "off"
    most: int = 0
    fewer: bool = False

    @classmethod
    def of(cls, text: str) -> "Speculation":
        """The choice that `text` names: auto, off, suffix or suffix:K. Raises UsageError."""
        mode, colon, count = text.partition(":")
        if mode == "off" and not colon:
            return cls()
        if mode == "auto" and not colon:
            return cls("auto", MAX_DRAFT, fewer=True)
        if mode == "suffix" and not colon:
            return cls("suffix", MAX_DRAFT, fewer=True)
        if mode == "suffix" and count.isdecimal() and 1 <= int(count) <= MAX_DRAFT:
            return cls("suffix", int(count))
        raise UsageError(
            f"speculate: expected auto, off, suffix or suffix:K, got {text!r}",
            hint=f"in suffix:K, K is the most tokens of a draft, from 1 to {MAX_DRAFT}",
        )


OFF = Speculation()
