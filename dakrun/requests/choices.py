"""The choices of a row, collected: a row's result is written when the last of them is there.

Knows results, neither formats nor files.
"""

from dataclasses import replace

from dakrun.requests.request import Completion, RowError


class Choices:
    """Results of rows with several choices, kept until a row has them all."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Completion | RowError]] = {}  # by the row's id

    def add(self, result: Completion | RowError) -> tuple[Completion, ...] | RowError | None:
        """Add a choice's result. With the last one of a row return its choices, in their order.

        An error of a choice is the row's error. None while choices are missing.
        """
        kept = self._kept.setdefault(result.id, [])
        kept.append(result)
        if len(kept) < result.reply.choices:
            return None
        del self._kept[result.id]
        kept.sort(key=lambda one: one.reply.choice)
        for one in kept:
            if isinstance(one, RowError):
                where = f"choice {one.reply.choice}: " if len(kept) > 1 else ""
                return replace(one, message=where + one.message)
        return tuple(one for one in kept if isinstance(one, Completion))
