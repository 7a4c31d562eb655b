"""Names of a prompt's KV blocks: equal names, equal tokens in the block and in all before it.

Knows tokens only; which blocks of the KV cache have a name is KVCache's.
"""

import hashlib
from array import array
from collections.abc import Sequence

from dakrun.geometry import KV_BLOCK

NAME_BYTES = 16  # 128 bits: two of 10^9 blocks share a name with a probability of 10^-21


def block_names(tokens: Sequence[int]) -> list[bytes]:
    """The names of the full blocks of `tokens`, in order.

    A name is the BLAKE2b hash of the name before it and of the block's tokens.
    """
    data = memoryview(array("q", tokens)).cast("B")
    size = 8 * KV_BLOCK
    names, name = [], b""
    for start in range(0, len(data) - size + 1, size):
        name = hashlib.blake2b(name + data[start : start + size], digest_size=NAME_BYTES).digest()
        names.append(name)
    return names
