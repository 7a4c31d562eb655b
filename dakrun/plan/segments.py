"""Prompts cut into segments, which passes of prefill cache one after the other.

Knows slots and lengths; neither tokens nor what a pass computes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """`length` tokens of one slot that enter its cache from position `start` on."""

    slot: int
    start: int
    length: int


def passes(prompts: Mapping[int, int], chunk_tokens: int) -> Iterator[list[Segment]]:
    """The segments of each pass, of `chunk_tokens` in all but the last, which may have fewer.

    `prompts` are lengths in tokens by slot.
    """
    chunk: list[Segment] = []
    room = chunk_tokens
    for slot, prompt in prompts.items():
        start = 0
        while start < prompt:
            length = min(prompt - start, room)
            chunk.append(Segment(slot, start, length))
            start, room = start + length, room - length
            if room == 0:
                yield chunk
                chunk, room = [], chunk_tokens
    if chunk:
        yield chunk
