"""Many guides at once, on all cores, by llguidance's executor; other threads run meanwhile."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dakrun.grammars.guide import Guide

if TYPE_CHECKING:
    import numpy as np


class ParallelGuides:
    """Steps and masks of guides, computed by `threads` threads."""

    def __init__(self, threads: int) -> None:
        from llguidance import LLExecutor

        self._executor = LLExecutor(threads)

    def accept(self, chosen: Sequence[tuple[Guide, int]]) -> None:
        """Let each guide go on behind its token."""
        consuming = [(guide.matcher, token) for guide, token in chosen if guide.matcher]
        for guide, token in chosen:
            if not guide.matcher:
                guide.accept(token)
        if consuming:  # else the executor raises
            self._executor.consume_token_par(consuming)

    def fill(self, guides: Mapping[int, Guide], masks: "np.ndarray") -> None:
        """Write which tokens are allowed next to masks[number] of each guide.

        masks: int32 [n, ceil(vocabulary / 32)], contiguous.
        """
        matchers = {number: guide.matcher for number, guide in guides.items() if guide.matcher}
        for number, guide in guides.items():
            if number not in matchers:
                guide.fill(masks[number])
        wanted = [(matcher, number) for number, matcher in matchers.items()]
        if wanted:
            self._executor.unsafe_compute_mask_ptr(
                wanted, masks.ctypes.data, masks.strides[0], len(masks)
            )
        for number, matcher in matchers.items():
            if matcher.is_error():
                masks[number] = 0
