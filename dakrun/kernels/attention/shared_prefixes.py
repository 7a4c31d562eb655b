"""Groups of slots that share leading KV blocks, which attention then reads once for all of them.

Knows slots and numbers of blocks, neither memory nor kernels.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class SharedPrefix(NamedTuple):
    """Slots whose first `blocks` KV blocks are the same."""

    slots: tuple[int, ...]
    blocks: int

    @property
    def saved(self) -> int:
        """Blocks less to read if they are read once."""
        return (len(self.slots) - 1) * self.blocks


def shared_prefixes(held: Mapping[int, Sequence[int]]) -> list[SharedPrefix]:
    """Divide slots into those that share a prefix, so that most blocks are saved.

    A slot is in one of the results at most. `held` has the numbers of each slot's first blocks;
    only those that other slots have, too, need be there. Prefixes form a tree: results are the
    prefix of all slots with the first block, or the longer ones of some of them, whichever saves
    more. Slots and results are in the order of `held`.
    """
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for slot, blocks in held.items():
        together[tuple(blocks)].append(slot)
    # Nodes in the order in which they are found, parents first; node 0 is the empty prefix.
    children: dict[tuple[int, int], int] = {}  # by parent and block
    parents, depths, counts = [-1], [0], [0]
    ends: list[tuple[int, list[int]]] = []  # node, and the slots whose blocks end there
    for blocks, slots in together.items():
        node = 0
        for depth, block in enumerate(blocks, 1):
            child = children.setdefault((node, block), len(parents))
            if child == len(parents):
                parents.append(node)
                depths.append(depth)
                counts.append(0)
            counts[child] += len(slots)
            node = child
        ends.append((node, slots))
    below = [0] * len(parents)  # blocks that the best division of a node's longer prefixes saves
    chosen = [False] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        own = (counts[node] - 1) * depths[node]
        chosen[node] = own > below[node]
        below[parents[node]] += max(own, below[node])
    members: dict[int, list[int]] = defaultdict(list)
    for end, slots in ends:
        outermost, node = 0, end
        while node > 0:
            if chosen[node]:
                outermost = node
            node = parents[node]
        if outermost:
            members[outermost] += slots
    return [SharedPrefix(tuple(slots), depths[node]) for node, slots in members.items()]
