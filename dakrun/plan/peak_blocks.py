"""The most KV blocks that running requests need at any later step, and whether so many are there.

Pure arithmetic; knows neither tiers nor slots.
"""

from collections.abc import Sequence

from dakrun.geometry import KV_BLOCK


def blocks_suffice(cached: Sequence[int], remaining: Sequence[int], blocks: int) -> bool:
    """Whether `blocks` suffice at every later step: whether peak_blocks() is at most that.

    As ceil(n / KV_BLOCK) lies between n / KV_BLOCK and that + 1, sums of positions mostly decide.
    """
    import numpy as np  # late, for a quick start of commands that do not get here

    order = np.argsort(-np.asarray(remaining), kind="stable")
    counts = np.arange(1, len(order) + 1)
    positions = np.cumsum(np.asarray(cached)[order]) + counts * np.asarray(remaining)[order]
    if (positions > blocks * KV_BLOCK).any():
        return False
    if (positions <= (blocks - counts) * KV_BLOCK).all():
        return True
    return peak_blocks(cached, remaining) <= blocks


def peak_blocks(cached: Sequence[int], remaining: Sequence[int]) -> int:
    """The most KV blocks that requests have at once if each step adds a position to all of them.

    Request i has cached[i] positions now, and ends with cached[i] + remaining[i]; its blocks are
    then free. Blocks only grow until a request ends, so the maximum is at some request's last step.
    With the requests in the order of their ends, the last first, the blocks at the last step of
    number i, r steps from now, are those of the requests up to i:

        sum of ceil((cached[j] + r) / KV_BLOCK) for j <= i.
    """
    import numpy as np  # late, for a quick start of commands that do not get here

    order = np.argsort(-np.asarray(remaining), kind="stable")
    steps = np.asarray(remaining)[order]
    lengths = np.asarray(cached)[order]
    # With c = 64 q + a and r = 64 p + b, ceil((c + r) / 64) = q + p + ceil((a + b) / 64).
    whole = np.cumsum(lengths // KV_BLOCK)
    counts = np.arange(1, len(order) + 1)
    rest = np.zeros((len(order), KV_BLOCK + 1), dtype=np.int32)
    rest[np.arange(len(order)), lengths % KV_BLOCK] = 1
    at_most = np.cumsum(np.cumsum(rest, axis=0), axis=1)  # j <= i with a remainder of at most a
    b = steps % KV_BLOCK
    none = np.where(b == 0, at_most[:, 0], 0)  # a + b = 0
    two = counts - at_most[np.arange(len(order)), KV_BLOCK - b]  # a + b > 64
    blocks = whole + counts * (steps // KV_BLOCK) + counts - none + two
    return int(blocks.max(initial=0))
