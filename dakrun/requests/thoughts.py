"""Thoughts in answers: their markers by family of models, and where a thought ends.

Knows texts and chat templates; knows neither rows nor tokens.
"""

from typing import NamedTuple

from dakrun.errors import invalid_value


class Markers(NamedTuple):
    """The texts before and after a thought."""

    open: str
    close: str


FAMILIES = {
    "Qwen3, QwQ, DeepSeek-R1, Phi-4": Markers("<think>", "</think>"),
    "Magistral": Markers("[THINK]", "[/THINK]"),
}


def given_markers(reasoning: str) -> Markers | None:
    """The markers in `reasoning`, OPEN,CLOSE; None for auto and off. Raises UsageError."""
    if reasoning in ("auto", "off"):
        return None
    first, _, second = reasoning.partition(",") if isinstance(reasoning, str) else ("", "", "")
    if not first or not second or "," in second or first == second:
        raise invalid_value("reasoning", reasoning, "auto, off or two markers, as <think>,</think>")
    return Markers(first, second)


def markers_of(template: str, reasoning: str) -> Markers | None:
    """The markers of the thoughts that a chat template is about; None if there are none.

    `reasoning` is auto, off or OPEN,CLOSE; only for auto the template is read.
    """
    if reasoning != "auto":
        return given_markers(reasoning)
    return next((one for one in FAMILIES.values() if any(part in template for part in one)), None)


class Thought(NamedTuple):
    """A thought that an answer begins with, or may begin with; `begun`: the prompt opened it."""

    markers: Markers
    begun: bool

    def split(self, text: str) -> tuple[str | None, str | None]:
        """The thought in an answer, and the text behind it.

        The first is None if there is no thought, the second if the thought does not end.
        """
        if (start := self._start(text)) is None:
            return None, text
        thought, closed, rest = text[start:].partition(self.markers.close)
        return thought.strip(), rest if closed else None

    def end(self, text: str) -> int:
        """Where the text behind the thought begins; 0 without one."""
        _, rest = self.split(text)
        return len(text) - len(rest or "")

    def _start(self, text: str) -> int | None:
        """Where the thought's text begins; some models repeat the marker that the prompt has."""
        blanks = len(text) - len(text.lstrip())
        if text.startswith(self.markers.open, blanks):
            return blanks + len(self.markers.open)
        return 0 if self.begun else None


def thought_after(prompt: str, markers: Markers) -> Thought | None:
    """The thought that an answer to a rendered prompt may begin with.

    None if the prompt's end has closed one, as templates write it where thinking is switched off.
    """
    end = prompt.rstrip()
    if end.endswith(markers.close):
        return None
    return Thought(markers, begun=end.endswith(markers.open))


def thought_within(message: str, markers: Markers) -> Thought | None:
    """The thought that a message's continuation begins in; None outside of thoughts."""
    is_open = message.rfind(markers.open) > message.rfind(markers.close)
    return Thought(markers, begun=True) if is_open else None
