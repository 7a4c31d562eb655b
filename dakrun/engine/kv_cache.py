"""The KV cache of running requests: blocks of 64 positions in the pools of several memory tiers.

A slot holds a running request. It is in one tier, whose blocks it takes one by one as it grows
and gives back at its end. A slot of the local tier may spill: its leading blocks then lie in the
first remote one, up to `spill_blocks` of all slots. Slots share full blocks of equal prompts, which
are found by name; shared blocks that no slot has are kept until their room is needed. Knows slots,
blocks, layers and bytes; kv_layout.py knows what lies in a block. Knows neither requests nor plans.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch

from dakrun.engine.kv_layout import SlotLayout
from dakrun.engine.prefix_cache import PrefixCache
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.attention import BlockTables
from dakrun.memory.device import device_view, in_order, upload
from dakrun.memory.tiers import Tier
from dakrun.units import ceil_div


class KVCache:
    """Blocks for requests in slots, which are numbered tier after tier.

    `counts` are the slots of each tier, `blocks` the blocks of each tier's pool; `parts` are their
    bytes, uint8 [blocks, layers, layer_bytes of the layout]. Local slots may spill: up to
    `spill_blocks` of their leading blocks, of all slots together, lie in the first remote tier.
    """

    def __init__(
        self,
        placement: Sequence[tuple[str, int, int]],
        layers: int,
        layout: SlotLayout,
        tiers: Mapping[str, Tier],
        device: torch.device,
        *,
        spill_blocks: int = 0,
    ) -> None:
        """Take the memory; `placement` gives (tier, slots, blocks), the local tier first."""
        self.device, self._layout, self.spill_blocks = device, layout, spill_blocks
        self.counts = tuple(slots for _, slots, _ in placement)
        self.blocks = tuple(blocks for _, _, blocks in placement)
        self.parts = [
            tiers[tier].allocate((blocks, layers, layout.layer_bytes), torch.uint8)
            for tier, _, blocks in placement
        ]
        self._on_device = [device_view(part, device) for part in self.parts]
        self._tier = [t for t, count in enumerate(self.counts) for _ in range(count)]
        self._free = [list(reversed(range(count))) for count in self.blocks]
        self._blocks: list[list[int]] = [[] for _ in self._tier]
        self._spilled = [0] * len(self._tier)  # leading blocks of each slot that lie in tier 1
        self._shared = [0] * len(self._tier)  # leading blocks of each slot that `share` gave it
        self._prefixes = [PrefixCache() for _ in self.counts]
        self._has_tables = layout.head_bytes is not None
        shape = (self.slots, layout.blocks if self._has_tables else 0)
        self._addresses = torch.zeros(shape, dtype=torch.int64, device=device)
        self._changes: dict[int, int] = {}  # of `_addresses`, by the number of the element

    @property
    def slots(self) -> int:
        """Number of slots in all tiers."""
        return len(self._tier)

    @property
    def slot_blocks(self) -> int:
        """Blocks of a slot at most."""
        return self._layout.blocks

    def tier(self, slot: int) -> int:
        """Number of the tier of a slot."""
        return self._tier[slot]

    def free(self, tier: int) -> int:
        """Blocks of a tier that no slot has, those that are kept under a name included."""
        return len(self._free[tier]) + len(self._prefixes[tier].cached)

    def borrowed(self, tier: int) -> int:
        """Blocks of a tier that slots have by `share`, each counted once."""
        return len(self._prefixes[tier].borrowers)

    def spilled(self, slot: int) -> int:
        """Leading blocks of a local slot that lie in the first remote tier."""
        return self._spilled[slot]

    def remote_blocks(self, slot: int) -> int:
        """Blocks of a slot outside the local tier; they are its leading ones."""
        return len(self._blocks[slot]) if self._tier[slot] else self._spilled[slot]

    def spill(self, slot: int, blocks: int) -> bool:
        """Give an empty local slot its first `blocks` in the first remote tier, if there is room.

        Blocks of such a slot are not shared.
        """
        if blocks > self.spill_blocks - sum(self._spilled) or blocks > self.free(1):
            return False
        assert self._tier[slot] == 0 and not self._blocks[slot], "expected an empty local slot"
        self._spilled[slot] = blocks
        for number in range(blocks):
            self._take(1, slot)
            self._note(slot, number)
        return True

    def common(self, slot: int) -> list[int]:
        """Numbers, in the tier, of the first blocks of `slot` that other slots have, too."""
        if self._spilled[slot]:
            return []
        references = self._prefixes[self._tier[slot]].references
        return list(itertools.takewhile(lambda block: references[block] > 1, self._blocks[slot]))

    def share(self, slot: int, names: Sequence[bytes]) -> int:
        """Let the first blocks of `slot` be those that are named `names`, as far as they exist.

        They replace blocks that the slot has, in which nothing is stored yet. Returns how many
        leading blocks of the slot are shared by now.
        """
        tier, held = self._tier[slot], self._blocks[slot]
        pool, number = self._prefixes[tier], self._shared[slot]
        if self._spilled[slot]:
            return 0
        while number < len(names) and (block := pool.find(names[number])) is not None:
            pool.lend(block)
            if number < len(held):
                self._give_back(tier, held[number])
                held[number] = block
            else:
                held.append(block)
            self._note(slot, number)
            number += 1
        self._shared[slot] = number
        return number

    def publish(self, slot: int, names: Sequence[bytes]) -> None:
        """Name the first blocks of `slot`, which launches so far fill, to be shared from now on."""
        if self._spilled[slot]:
            return
        for block, name in zip(self._blocks[slot], names, strict=False):
            self._prefixes[self._tier[slot]].name(block, name)

    def reserve(self, slot: int, positions: int) -> bool:
        """Give `slot` blocks for `positions` positions; False, and none, if they are not free."""
        held, tier = self._blocks[slot], self._tier[slot]
        more = ceil_div(positions, KV_BLOCK) - len(held)
        if more > self.free(tier):
            return False
        for _ in range(more):
            self._take(tier, slot)
            self._note(slot, len(held) - 1)
        return True

    def room(self, slot: int) -> int:
        """Positions for which `slot` has blocks."""
        return len(self._blocks[slot]) * KV_BLOCK

    def release(self, slot: int) -> None:
        """Take back all blocks of `slot`.

        Steps that were launched for it may still read and write them: later steps, which are
        ordered after these, write a block's positions before they read them.
        """
        tier, held = self._tier[slot], self._blocks[slot]
        for block in held[: self._shared[slot]]:
            self._prefixes[tier].end_loan(block)
        for number in reversed(range(len(held))):
            self._give_back(self._tier_of(slot, number), held[number])
        self._blocks[slot], self._shared[slot], self._spilled[slot] = [], 0, 0

    def release_all(self) -> None:
        """Take back all blocks of all slots, and forget all names."""
        for slot in range(self.slots):
            self.release(slot)
        for free, pool in zip(self._free, self._prefixes, strict=True):
            while pool.cached:
                free.append(pool.evict())

    def block(self, slot: int, number: int) -> torch.Tensor:
        """Block `number` of a slot, uint8 [layers, layer_bytes], in its tier."""
        return self.parts[self._tier_of(slot, number)][self._blocks[slot][number]]

    def address(self, slot: int, number: int) -> int:
        """Address of that block in layer 0."""
        return self._address(self._tier_of(slot, number), self._blocks[slot][number])

    def runs(self, slot: int, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """The slot's blocks numbered `start` to `stop` - 1, as runs that lie side by side.

        A run is its first block's number, and uint8 [blocks, layers, layer_bytes] in the tier.
        """
        held, found = self._blocks[slot], []
        placed = [(n, held[n], self._tier_of(slot, n)) for n in range(start, min(stop, len(held)))]
        for (tier, _), run in itertools.groupby(placed, lambda at: (at[2], at[1] - at[0])):
            numbers, blocks, _ = zip(*run, strict=True)
            found.append((numbers[0], self.parts[tier][blocks[0] : blocks[-1] + 1]))
        return found

    def gather(self, layer: int, slot: int, stop: int, start: int = 0) -> torch.Tensor:
        """The slot's blocks numbered `start` to `stop` - 1 in one layer, uint8 [n, layer_bytes].

        They are a copy on `device`, in the order of its current stream.
        """
        border, found = max(start, min(stop, self._spilled[slot])), []
        for first, last in ((start, border), (border, stop)):
            if first < last or start == stop:
                part = self._on_device[self._tier_of(slot, first)]
                held = torch.tensor(self._blocks[slot][first:last], dtype=torch.int64)
                with in_order(part.device, self.device):  # a peer gathers on a stream of its own
                    numbers = upload(held, part.device)
                    found.append(part[:, layer].index_select(0, numbers).to(self.device))
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def tables(self) -> BlockTables:
        """The block tables of all slots, if the layout has them, as of the last `flush`.

        Their memory is fixed. What lies behind the blocks that a slot has is meaningless.
        """
        assert self._layout.head_bytes is not None, "kernels do not read this layout"
        return BlockTables(self._addresses, self._layout.head_bytes, self._layout.layer_bytes)

    def flush(self) -> None:
        """Write the changes of block tables to the device, on torch's current stream."""
        if self._changes:
            numbers = torch.tensor([list(self._changes), list(self._changes.values())])
            where, values = upload(numbers, self.device)
            self._addresses.view(-1)[where] = values
            self._changes = {}

    def pretend(self, positions: int) -> list[int]:
        """Write tables in which all slots have blocks for `positions`, to measure with.

        Slots share blocks if there are too few. Takes back the blocks of all slots. Returns how
        many leading blocks of each slot are then in the first remote tier: as large a part of
        those of local slots as `spill_blocks` is of all that these may have.
        """
        self.release_all()
        count, most = ceil_div(positions, KV_BLOCK), self.blocks[0] + self.spill_blocks
        spilled = ceil_div(count * self.spill_blocks, most) if self.spill_blocks else 0
        for slot, tier in enumerate(self._tier):
            for number in range(count):
                at = 1 if tier == 0 and number < spilled else tier
                address = self._address(at, (slot * count + number) % self.blocks[at])
                self._changes[slot * self.slot_blocks + number] = address
        self.flush()
        return [0 if tier else spilled for tier in self._tier]

    def _tier_of(self, slot: int, number: int) -> int:
        """Number of the tier of block `number` of a slot."""
        return 1 if number < self._spilled[slot] else self._tier[slot]

    def _take(self, tier: int, slot: int) -> None:
        """Give `slot` one block more, of `tier`."""
        pool = self._prefixes[tier]
        block = self._free[tier].pop() if self._free[tier] else pool.evict()
        pool.references[block] += 1
        self._blocks[slot].append(block)

    def _give_back(self, tier: int, block: int) -> None:
        """One slot fewer has `block`."""
        if self._prefixes[tier].drop(block):
            self._free[tier].append(block)

    def _note(self, slot: int, number: int) -> None:
        """Block `number` of `slot` has changed."""
        if self._has_tables:
            self._changes[slot * self.slot_blocks + number] = self.address(slot, number)

    def _address(self, tier: int, block: int) -> int:
        part = self.parts[tier]
        return part.data_ptr() + block * part.stride(0)
