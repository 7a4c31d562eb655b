"""Log-probabilities of chosen tokens and of the likeliest ones.

They are the model's own: temperature, top-k and top-p change which token is chosen, not these.
"""

import torch

LOWEST = -9999.0  # for a token of probability 0, as OpenAI has it: JSON knows no infinity
# Rows are handled in groups of this many logits: about 50 MiB of scratch, whatever the batch.
_GROUP_LOGITS = 2**22


def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int64, and their log-probabilities, float32, both [n, 1 + top].

    The first of a row is its token of `tokens`, int64 [n]; the others are its likeliest tokens in
    order, fewer than `top` in a small vocabulary. logits: [n, vocabulary], of any floating dtype.
    Logarithms are natural, computed in float32, and at least LOWEST.
    """
    vocab = logits.shape[1]
    group = max(1, _GROUP_LOGITS // vocab)
    sums = torch.cat([part.float().logsumexp(-1, keepdim=True) for part in logits.split(group)])
    likeliest = logits.topk(min(top, vocab), dim=-1).indices
    ids = torch.cat((tokens[:, None], likeliest), dim=1)
    return ids, (logits.gather(1, ids).float() - sums).clamp(min=LOWEST)
