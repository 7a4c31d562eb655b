"""Log-probabilities of chosen tokens, of a prompt's tokens, and of the likeliest ones.

They are the model's own: temperature, top-k and top-p change which token is chosen, not these.
"""

from collections.abc import Callable, Sequence

import torch

from dakrun.engine.step import Likeliest, Row, Step
from dakrun.memory.device import download, upload

LOWEST = -9999.0  # for a token of probability 0, as OpenAI has it: JSON knows no infinity
# Rows are handled in groups of this many logits: about 50 MiB of scratch, whatever the batch.
_GROUP_LOGITS = 2**22


def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int64, and their log-probabilities, float32, both [n, 1 + top].

    The first of a row is its token of `tokens`, int64 [n]; the others are its likeliest tokens in
    order, fewer than `top` in a small vocabulary. logits: [n, vocabulary], of any floating dtype.
    Logarithms are natural, computed in float32, and at least LOWEST; all of a row are NaN if one of
    its logits is NaN or positive infinity.
    """
    vocab = logits.shape[1]
    group = max(1, _GROUP_LOGITS // vocab)
    sums = torch.cat([part.float().logsumexp(-1, keepdim=True) for part in logits.split(group)])
    sums = sums.where(sums < torch.inf, torch.nan)
    likeliest = logits.topk(min(top, vocab), dim=-1).indices
    ids = torch.cat((tokens[:, None], likeliest), dim=1)
    return ids, (logits.gather(1, ids).float() - sums).clamp(min=LOWEST)


class Scores:
    """Log-probabilities of `scored` tokens of a step's prompts, on their way from the device."""

    def __init__(
        self,
        step: Step,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        most: int,
    ) -> None:
        """Start to compute them, without waiting.

        hidden: the last layer's output [n, H] after the prompts' tokens, part after part.
        `logits_of` makes logits [m, V] of m of its rows, which the next call may overwrite; m is up
        to `most`.
        """
        self._rows = step.rows
        scored = [row for row in step.prompts if row.scored]
        numbers = _scored_rows(step.prompts)
        targets = torch.tensor([token for row in scored for token in row.scored])
        top = max(row.sampling.params.prompt_logprobs or 0 for row in scored)
        found = [
            log_probabilities(logits_of(hidden[at]), own, top)
            for at, own in zip(
                upload(numbers, hidden.device).split(most),
                upload(targets, hidden.device).split(most),
                strict=True,
            )
        ]
        self._parts = [download(torch.cat(parts)) for parts in zip(*found, strict=True)]
        self._ready = torch.cuda.current_stream().record_event() if hidden.is_cuda else None

    def collect(self) -> list[Sequence[Likeliest]]:
        """For each row of the step those of its `scored` tokens; waits."""
        if self._ready is not None:
            self._ready.synchronize()
        ids, values = (part.tolist() for part in self._parts)
        of = iter([list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)])
        return [
            [next(of)[: 1 + (row.sampling.params.prompt_logprobs or 0)] for _ in row.scored]
            for row in self._rows
        ]


def _scored_rows(parts: Sequence[Row]) -> torch.Tensor:
    """The numbers of tokens, among those of `parts`, behind which a `scored` token follows."""
    numbers, first = list[int](), 0
    for row in parts:
        numbers += range(first, first + len(row.scored))
        first += row.length
    return torch.tensor(numbers)
