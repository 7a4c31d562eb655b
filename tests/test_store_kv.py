"""Keys and values of prompts end up in slots as kv_blocks.write would put them, bit for bit."""

import pytest
import torch

from dakrun.geometry import HEAD_DIMS, KV_BLOCK
from dakrun.kernels import store_kv
from dakrun.kernels.attention import KVShape, kv_blocks
from dakrun.kernels.runtime import DTYPES
from dakrun.models.functional import rotate

LAYERS = 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("turns", [False, True])
def test_two_prompts_in_two_slots(
    dim: int, dtype: torch.dtype, turns: bool, kernel_device: str
) -> None:
    """One of them goes on in the middle of a block."""
    torch.manual_seed(0)
    heads, kv_heads = 5, 2
    shape = KVShape(kv_heads, dim, 200)
    segments = ((1, 0, 70), (0, 37, 9))  # slot, start, length
    qkv = torch.randn(79, heads + 2 * kv_heads, dim, device=kernel_device).to(dtype)
    slots = torch.zeros(2, LAYERS, shape.slot_bytes, dtype=torch.uint8, device=kernel_device)
    wanted = slots.clone()
    kv_addresses, positions = [], []
    for slot, start, length in segments:
        for position in range(start, start + length):
            block, row = divmod(position, KV_BLOCK)
            key = slots[slot].data_ptr() + (block * 2 * KV_BLOCK + row) * dim * 2
            kv_addresses.append((key, shape.slot_bytes, shape.slot_bytes // kv_heads))
            positions.append(position)
    at = torch.tensor(positions, dtype=torch.int32, device=kernel_device)
    rotations = None
    before = qkv.clone()
    q, k, v = before.split((heads, kv_heads, kv_heads), dim=1)
    if turns:
        angles = torch.rand(200, dim // 2, device=kernel_device) * 6
        rotations = torch.stack((angles.cos(), angles.sin()), -1)
        cos, sin = rotations[at.long(), None].unbind(-1)
        q, k = (rotate(x.float(), cos, sin).to(dtype) for x in (q, k))
    where = torch.tensor(kv_addresses, device=kernel_device)
    store_kv(qkv, at, where, 1, kv_heads=kv_heads, rotations=rotations)

    found_q, found_k, found_v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    assert torch.equal(found_v, v)
    limit = 2 ** (-7 if dtype == torch.bfloat16 else -10) if turns else 0
    for found, expected in ((found_q, q), (found_k, k)):  # products may be fused into sums
        torch.testing.assert_close(found, expected, rtol=limit, atol=4 * limit)
    first = 0
    for slot, start, length in segments:
        part = slice(first, first + length)
        keys, values = (x[part].transpose(0, 1) for x in (found_k, v))
        kv_blocks.write(wanted[slot][1], keys, values, start, shape)
        first += length
    assert torch.equal(slots, wanted)


def test_what_does_not_fit() -> None:
    qkv = torch.zeros(2, 6, 64, dtype=torch.float16)
    at, kv_addresses = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
    for bad, kv_heads in ((qkv[..., :40], 1), (qkv, 3), (qkv, 0)):
        with pytest.raises(ValueError, match="expected qkv as"):
            store_kv(bad, at, kv_addresses, 0, kv_heads=kv_heads)
    with pytest.raises(ValueError, match="expected positions as"):
        store_kv(qkv, at[:1], kv_addresses, 0, kv_heads=1)
    with pytest.raises(ValueError, match="expected kv_addresses as"):
        store_kv(qkv, at, kv_addresses[:, :2], 0, kv_heads=1)
