"""Acceptance: a step's tokens that count, up to the first that its draft did not foresee.

A token follows from the logits at its position, the request's history and its noise, so a draft is
accepted if and only if it is the token that is chosen there. native/accept_drafts.cu is the same
for a GPU's steps.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from dakrun.engine.adjustments import History
from dakrun.engine.sampler import sample
from dakrun.engine.step import Row
from dakrun.grammars import Guide
from dakrun.units import ceil_div


def accept(
    logits: torch.Tensor, rows: Sequence[Row], guides: Mapping[int, Guide]
) -> list[list[int]]:
    """The tokens accepted for each row, from the logits [n, V] after its `wanted` tokens.

    The first of these logits always gives a token; those behind a draft give one if the draft was
    the token before. `guides`, by slot, of rows with guidance go on behind the accepted tokens.
    """
    firsts = [0, *accumulate(row.wanted for row in rows)]
    accepted: list[list[int]] = [[] for _ in rows]
    open_rows = list(range(len(rows)))
    while open_rows:
        own = [(rows[number], accepted[number]) for number in open_rows]
        ends = [firsts[number] + len(accepted[number]) for number in open_rows]
        tokens = sample(
            logits if len(ends) == len(logits) else logits[ends],
            [row.sampling.params for row, _ in own],
            [row.sampling.seed for row, _ in own],
            [row.last + 2 - row.wanted + len(new) for row, new in own],
            [_with(row, new) for row, new in own],
            _allowed([row for row, _ in own], guides, logits),
        ).tolist()
        for (row, new), token in zip(own, tokens, strict=True):
            new.append(token)
            if row.sampling.guidance is not None and token >= 0:
                guides[row.slot].accept(token)
        open_rows = [number for number in open_rows if _goes_on(rows[number], accepted[number])]
    return accepted


def _with(row: Row, new: Sequence[int]) -> History:
    """The row's history, and its `new` tokens."""
    history = row.sampling.history
    return history._replace(tokens=[*history.tokens, *new]) if new else history


def _goes_on(row: Row, new: Sequence[int]) -> bool:
    """Whether the last of a row's `new` tokens is the draft behind which there are logits."""
    if len(new) == row.wanted or new[-1] != row.tokens[len(new) - row.wanted]:
        return False
    # A grammar has no token behind an end.
    return row.sampling.guidance is None or new[-1] not in row.sampling.history.ends


def _allowed(
    rows: Sequence[Row], guides: Mapping[int, Guide], logits: torch.Tensor
) -> dict[int, torch.Tensor]:
    """The tokens that the guides of rows allow next, bool [V] by the row's number."""
    found, vocabulary = {}, logits.shape[1]
    for number, row in enumerate(rows):
        if row.sampling.guidance is not None:
            mask = np.empty(ceil_div(vocabulary, 32), dtype=np.int32)
            guides[row.slot].fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little")
            found[number] = torch.from_numpy(bits.astype(bool)).to(logits.device)
    return found
