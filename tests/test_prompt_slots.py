"""Keys and values of prompts in slots of several tiers, by copies or where they lie."""

import pytest
import torch

from dakrun.engine import KVWriter, Row
from dakrun.engine.kv_cache import KVCache
from dakrun.kernels.attention import kv_blocks
from dakrun.memory.tiers import allocate_tiers
from dakrun.units import ceil_div

BLOCK_BYTES = 2 * 12 * 64 * 64 * 2  # of all heads


@pytest.mark.parametrize("blocks", [0, 1, 3, 4, 100], ids=lambda n: f"room for {n} blocks")
def test_slots_hold_what_was_stored(blocks: int, kernel_device: str) -> None:
    """Prompts begin, and go on, in local and remote slots; a block is filled up in two passes."""
    torch.manual_seed(0)
    device = torch.device(kernel_device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    shape = kv_blocks.KVShape(12, 64, 256)
    with allocate_tiers({"hbm": 2**26, "host": 2**26}, device) as tiers:
        cache = KVCache((("hbm", 2, 6), ("host", 2, 7)), 12, shape, tiers, device)
        assert cache.counts == (2, 2)
        room = torch.full((blocks * BLOCK_BYTES,), 255, dtype=torch.uint8, device=device)
        writer = KVWriter(cache, shape, room)
        held = [0] * 4
        kept = torch.randn(2, 4, 12, 250, 64, device=device).half()  # of layer 5
        for slot in (3, 0, 2, 3, 1, 0, 2, 3, 1, 2, 3):  # a slot's blocks do not lie side by side
            held[slot] += 64
            assert cache.reserve(slot, held[slot])
        assert not cache.reserve(0, 64 * 6) and not cache.reserve(2, 64 * 5)
        for passed in (
            [Row(3, 0, length=130), Row(0, 0, length=70), Row(2, 0, length=1)],
            [
                Row(2, 1, length=63),
                Row(3, 130, length=100),
                Row(1, 0, length=5),
                Row(0, 70, length=10),
            ],
            [Row(2, 64, length=65), Row(1, 5, length=100)],
        ):
            spans = [range(s.start, s.start + s.length) for s in passed]
            positions = torch.tensor([p for span in spans for p in span], dtype=torch.int32)
            qkv = torch.randn(len(positions), 36, 64, device=device).half()
            first = 0
            for s, span in zip(passed, spans, strict=True):
                at = slice(span.start, span.stop)
                for number, of in enumerate(kept[:, s.slot, :, at]):
                    heads = slice(12 * (1 + number), 12 * (2 + number))
                    qkv[first : first + s.length, heads] = of.transpose(0, 1)
                first += s.length
            addresses = writer.addresses(passed, writer.begin(passed)).to(device)
            for layer in (4, 5, 6):  # others have other values
                other = qkv if layer == 5 else torch.randn_like(qkv)
                writer.store(layer, other, positions.to(device), addresses, None)
            writer.end()
        for slot, end in enumerate((80, 105, 129, 230)):
            found = kv_blocks.read_blocks(
                cache.gather(5, slot, ceil_div(end, 64)), end, torch.float16, shape
            )
            for x, wanted in zip(found, kept[:, slot, :, :end], strict=True):
                assert torch.equal(x, wanted), (slot, end)


def test_blocks_of_a_slot() -> None:
    shape = kv_blocks.KVShape(12, 64, 250)
    assert 12 * shape.head_bytes == BLOCK_BYTES
    assert shape.slot_bytes == shape.blocks * BLOCK_BYTES
