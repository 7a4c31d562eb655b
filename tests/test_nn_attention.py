"""SplitKFlashAttn over a PartitionedKVCache: torch's attention, whichever tier a slot lies in.

On a CPU in plain torch and by the emulated kernel; on a GPU also in CUDA graphs.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cards import hold_to, hopper
from peers import readable_peer

import dakrun.nn.attention
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import LOCAL
from dakrun.kernels.attention import KVShape, kv_blocks
from dakrun.launches import TierAccess
from dakrun.nn import PartitionedKVCache, SplitKFlashAttn

ACCESS = TierAccess(sms=2, window_bytes=64 * 1024)
RATIOS = (0.0, 0.5, 1.0)
BATCH = 3
PADDING = (0, 5, 59)


@dataclass
class Case:
    """Tokens of a batch, all but `steps` of them in a prefill, and one layer after the other."""

    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float16
    device: str = "cpu"
    layers: int = 2
    kv_heads: int = 2
    prompt: int = 60
    steps: int = 10
    padding: Sequence[int] | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.group + self.dim)
        heads, tokens = self.kv_heads * self.group, self.prompt + self.steps
        sizes = (heads, self.kv_heads, self.kv_heads)
        qkv = torch.randn(self.layers, BATCH, tokens, sum(sizes), self.dim).transpose(2, 3)
        parts = qkv.to(self.device, self.dtype).split(sizes, 2)
        self.q, self.k, self.v = (part.contiguous() for part in parts)

    def cache(self, ratio: float, **options: Any) -> PartitionedKVCache:
        return PartitionedKVCache(
            BATCH, self.kv_heads, self.dim, self.prompt + self.steps, layers=self.layers,
            ratio=ratio, dtype=self.dtype, device=self.device, access=ACCESS, **options,
        )  # fmt: skip

    def part(self, layer: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        return tuple(x[layer, :, :, first:last] for x in (self.q, self.k, self.v))

    def prefill(self, attention: SplitKFlashAttn, cache: PartitionedKVCache) -> torch.Tensor:
        outs = [
            attention(*self.part(i, 0, self.prompt), cache, layer=i, padding=self.padding)
            for i in range(self.layers)
        ]
        return torch.stack(outs)

    def step(
        self, attention: SplitKFlashAttn, cache: PartitionedKVCache, token: int
    ) -> torch.Tensor:
        layers = range(self.layers)
        outs = [attention(*self.part(i, token, token + 1), cache, layer=i) for i in layers]
        return torch.stack(outs)

    def run(
        self, cache: PartitionedKVCache, attention: SplitKFlashAttn | None = None
    ) -> torch.Tensor:
        """The outputs [layers, B, Hq, tokens, D]."""
        attention = attention or SplitKFlashAttn()
        outs = [self.prefill(attention, cache)]
        for token in range(self.prompt, self.prompt + self.steps):
            outs.append(self.step(attention, cache, token))
        return torch.cat(outs, 3)

    def check(self, out: torch.Tensor, cache: PartitionedKVCache) -> None:
        """Outputs against float64; what is kept bit for bit."""
        allowed = 1e-3 if self.dtype == torch.float16 else 8e-3
        padding = self.padding or [0] * BATCH
        tokens = self.prompt + self.steps
        assert cache.lengths.tolist() == [tokens - pads for pads in padding]
        for layer in range(self.layers):
            slots = cache.slots_of(layer)
            for b, pads in enumerate(padding):
                q, k, v = (x[layer, b, :, pads:] for x in (self.q, self.k, self.v))
                exact = F.scaled_dot_product_attention(
                    q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
                )
                error = (out[layer, b, :, pads:].double() - exact).norm(dim=(0, 2))
                assert (error <= allowed * exact.norm(dim=(0, 2))).all(), (layer, b)
                lone = out[layer, b, :, :pads].unflatten(0, (self.kv_heads, self.group))
                assert (lone == self.v[layer, b, :, None, :pads]).all(), "pads see themselves"
                kept = kv_blocks.unpack(slots[b].to(self.device), self.dtype, cache.shape)
                assert all(
                    torch.equal(found[:, : tokens - pads], wanted)
                    for found, wanted in zip(kept, (k, v), strict=True)
                )


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [(1, 80, torch.float16), (2, 64, torch.bfloat16), (4, 128, torch.float16)],
)
def test_in_plain_torch(
    group: int, dim: int, dtype: torch.dtype, padding: Sequence[int] | None
) -> None:
    case = Case(group, dim, dtype, padding=padding)
    outs = []
    for ratio in RATIOS:
        with case.cache(ratio) as cache:
            outs.append(case.run(cache))
            case.check(outs[-1], cache)
            cache.reset()
            assert torch.equal(case.run(cache), outs[-1]), "a second batch in the same memory"
        assert torch.equal(outs[-1], outs[0])


@pytest.fixture
def emulated(
    emulated_kernels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Any]]:
    """The kernel in place of plain torch on the CPU; the list has what was launched."""
    launched: list[Any] = []

    def kernel(*variant: Any) -> Any:
        launched.append(variant)
        return emulated_kernels(*variant)

    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    # The emulated kernel runs on a CPU, with as many SMs as it is told.
    monkeypatch.setattr(dakrun.nn.attention, "_has_kernel", lambda _: True)
    hold_to(hopper(5), monkeypatch)
    yield launched


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("group", [1, 4])
def test_by_the_kernel(emulated: list[Any], group: int, padding: Sequence[int] | None) -> None:
    case = Case(group, prompt=60, steps=8, padding=padding)
    outs = []
    for ratio in RATIOS:
        with case.cache(ratio) as cache:
            for part in cache.parts:
                part.view(case.dtype).fill_(torch.nan)
            outs.append(case.run(cache))
            case.check(outs[-1], cache)
        assert torch.equal(outs[-1], outs[0])
    names = Counter(name for _, name, _ in emulated)
    assert names["splitk_flash_attn"] == len(RATIOS) * 8 * case.layers


def verified(case: Case, cache: PartitionedKVCache, count: int) -> torch.Tensor:
    """Case.run with `count` tokens at a time, each time after others that are dropped."""
    attention = SplitKFlashAttn()
    outs, token = [case.prefill(attention, cache)], case.prompt
    while token < case.prompt + case.steps:
        last = min(token + count, case.prompt + case.steps)
        for sign in (-1, 1):
            parts = [[sign * x for x in case.part(i, token, last)] for i in range(case.layers)]
            out = torch.stack([attention(*p, cache, layer=i) for i, p in enumerate(parts)])
            if sign < 0:
                cache.drop(torch.full_like(cache.lengths, last - token))
        outs.append(out)
        token = last
    return torch.cat(outs, 3)


@pytest.mark.parametrize("padding", [None, PADDING])
def test_several_tokens_of_filled_slots(padding: Sequence[int] | None) -> None:
    case = Case(2, steps=12, padding=padding)
    with case.cache(0.5) as cache:
        case.check(verified(case, cache, 4), cache)
        with pytest.raises(ValueError, match="counts up to lengths"):
            cache.drop(cache.lengths + 1)
        with pytest.raises(ValueError, match="room for 4 tokens"):
            SplitKFlashAttn()(*case.part(0, 0, 4), cache)
        cache.drop(torch.full_like(cache.lengths, 8))
        with pytest.raises(ValueError, match="empty slots only"):
            SplitKFlashAttn()(*case.part(0, 0, 4), cache, padding=[0] * BATCH)


def test_several_tokens_of_filled_slots_by_the_kernels(emulated: list[Any]) -> None:
    """Over the border of a KV block."""
    case = Case(4, prompt=60, steps=9, padding=PADDING)
    with case.cache(0.5) as cache:
        for part in cache.parts:
            part.view(case.dtype).fill_(torch.nan)
        case.check(verified(case, cache, 3), cache)
    assert {variant[0] for variant in emulated} == {"store_kv.cu", "prompt_attn.cu"}


def test_a_first_token_needs_no_prefill() -> None:
    case = Case(prompt=0, steps=3)
    cache, attention = case.cache(0.5), SplitKFlashAttn()
    out = torch.cat([case.step(attention, cache, token) for token in range(3)], 3)
    case.check(out, cache)
    assert torch.equal(out[:, :, ::2, 0], case.v[..., 0, :]), "alone, it attends to itself"


def test_the_scale() -> None:
    case = Case(prompt=8, steps=1, layers=1)
    (q, k, v), (new, *more) = case.part(0, 0, 8), case.part(0, 8, 9)
    plain, scaled = SplitKFlashAttn(), SplitKFlashAttn()
    one, other = case.cache(0), case.cache(0)
    torch.testing.assert_close(plain(q, k, v, one), scaled(q * 0.125, k, v, other, scale=1.0))
    torch.testing.assert_close(plain(new, *more, one), scaled(new * 0.125, *more, other, scale=1.0))


def test_slots_lie_where_the_ratio_says() -> None:
    shape = KVShape(kv_heads=3, head_dim=80, positions=100)
    assert shape.slot_bytes == 3 * 2 * 2 * 64 * 80 * 2, "two blocks of keys and values"
    for ratio, remote in ((0, 0), (0.1, 1), (0.04, 0), (0.5, 4), (1, 7)):
        cache = PartitionedKVCache(
            7, 3, 80, 100, layers=2, ratio=ratio, remote="peer:1", dtype=torch.float16
        )
        sizes = {LOCAL: 2 * (7 - remote), "peer:1": 2 * remote}
        assert cache.tier_bytes == {k: n * shape.slot_bytes for k, n in sizes.items()}
        assert {k: tier.capacity for k, tier in cache._tiers.items()} == cache.tier_bytes
        assert cache.ratio == remote / 7 and cache.slots == (7 - remote, remote)
        starts, size = cache.tables.addresses[:, 0].tolist(), shape.slot_bytes
        assert cache.tables.layer_bytes == size
        assert [[slot.data_ptr() for slot in cache.slots_of(i)] for i in range(2)] == (
            [[start + layer * size for start in starts] for layer in range(2)]
        )
        for number, slot in enumerate(cache.slots_of(0) + cache.slots_of(1)):
            tier = cache._tiers[LOCAL if number % 7 < 7 - remote else "peer:1"]._block.tensor
            assert 0 <= slot.data_ptr() - tier.data_ptr() <= tier.nbytes - slot.nbytes
        assert len(set(starts)) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 1.5}, "ratio from 0 to 1, got 1.5"),
        ({"remote": "disk"}, "host or peer:N .* 'disk'"),
        ({"dtype": torch.float32}, "float16 or bfloat16, got .*float32"),
        ({"batch": 0}, "at least one slot and one layer"),
        ({"layers": 0}, "at least one slot and one layer"),
        ({"head_dim": 48}, "head_dim"),
        ({"device": "meta"}, "CPU or a CUDA GPU, got meta"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    plain = {"batch": 2, "kv_heads": 2, "head_dim": 64, "positions": 9, "dtype": torch.float16}
    with pytest.raises(ValueError, match=message):
        PartitionedKVCache(**{**plain, **options})


def test_operands_that_do_not_fit() -> None:
    case = Case(prompt=4, steps=1)
    q, k, v = case.part(0, 0, 4)
    attention, cache = SplitKFlashAttn(), case.cache(0)
    of = r" of torch\.float16 on cpu, got "
    for bad, message in (
        ((q[:2], k, v), rf"query as \[3, Hq, L, 64\]{of}\[2, 4, 4, 64\]"),
        ((q[0], k, v), rf"query as \[3, Hq, L, 64\]{of}\[4, 4, 64\]"),
        ((q, k[:, :1], v), rf"key as \[3, 2, L, 64\]{of}\[3, 1, 4, 64\]"),
        ((q, k, v[:, :, :3]), rf"value as \[3, 2, L, 64\]{of}\[3, 2, 3, 64\]"),
        ((q[:, :, :0], k[:, :, :0], v[:, :, :0]), "query as"),
        ((q.float(), k, v), r"query as .* got \[3, 4, 4, 64\] of torch\.float32"),
        ((q[:, :3], k, v), "1 to 16 query heads .* got 3"),
        ((q[:, :1].expand(-1, 34, -1, -1), k, v), "1 to 16 query heads .* got 34"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*bad, cache)
    for padding in ([0, 0], [0, 4, 0], [0, -1, 0]):
        with pytest.raises(ValueError, match=f"got {re.escape(str(padding))} of 4 tokens"):
            attention(q, k, v, cache, padding=padding)
    with pytest.raises(ValueError, match="prefill only"):
        attention(*case.part(0, 0, 1), cache, padding=[0, 0, 0])
    assert not cache.lengths.any()
    attention(q, k, v, cache)  # layer 0 is still the next


def test_what_has_no_room() -> None:
    case = Case(prompt=4, steps=2)
    cache, attention = case.cache(0.5), SplitKFlashAttn()
    with pytest.raises(ValueError, match="layer 0 next, got 1"):
        attention(*case.part(1, 0, 4), cache, layer=1)
    case.run(cache)
    with pytest.raises(ValueError, match="room in every slot, but 6 "):
        case.step(attention, cache, 5)
    with pytest.raises(ValueError, match="room for 4 tokens in every slot of 6"):
        case.prefill(attention, cache)
    cache.reset()
    wide = [x.repeat(1, 1, 2, 1) for x in case.part(0, 0, 4)]
    with pytest.raises(ValueError, match="6 tokens at most, got 8"):
        attention(*wide, cache)
    case.check(case.run(cache), cache)


def test_closing() -> None:
    case = Case(prompt=4, steps=1)
    cache = case.cache(0.5)
    tiers = dict(cache._tiers)
    case.run(cache)
    cache.close()
    assert all(tier._block.tensor.numel() == 0 for tier in tiers.values())
    cache.reset()
    with pytest.raises(ValueError, match="closed"):
        case.prefill(SplitKFlashAttn(), cache)
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "dim"), [(1, 80), (2, 64), (3, 96), (4, 128), (16, 64)])
def test_on_a_gpu(group: int, dim: int, dtype: torch.dtype, padding: Sequence[int] | None) -> None:
    case = Case(group, dim, dtype, "cuda", steps=70, padding=padding)
    outs = []
    for ratio in RATIOS:
        with case.cache(ratio) as cache:
            for part in cache.parts:
                part.view(dtype).fill_(torch.nan)
            outs.append(case.run(cache))
            case.check(outs[-1], cache)
        assert torch.equal(outs[-1], outs[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "dim"), [(1, 80), (2, 64), (4, 128), (16, 64)])
def test_several_tokens_on_a_gpu(group: int, dim: int) -> None:
    case = Case(group, dim, device="cuda", steps=70, padding=PADDING)
    with case.cache(0.5) as cache:
        for part in cache.parts:
            part.view(case.dtype).fill_(torch.nan)
        case.check(verified(case, cache, 8), cache)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", RATIOS)
def test_one_graph_as_lengths_grow(ratio: float) -> None:
    case = Case(4, 128, device="cuda", prompt=100, steps=400, padding=PADDING)
    cache, attention = case.cache(ratio), SplitKFlashAttn()
    eager = case.run(cache, attention)
    case.check(eager, cache)
    static = [x[:, :, :, :1].clone() for x in (case.q, case.k, case.v)]
    outs = [torch.empty_like(x) for x in static[0]]
    graph = torch.cuda.CUDAGraph()
    cache.reset()
    with torch.cuda.graph(graph):
        for i in range(case.layers):
            outs[i].copy_(attention(*(x[i] for x in static), cache, layer=i))
    for _ in range(2):  # batches, one after the other
        cache.reset()
        found = [case.prefill(attention, cache)]
        for token in range(case.prompt, case.prompt + case.steps):
            for part, x in zip(static, (case.q, case.k, case.v), strict=True):
                part.copy_(x[:, :, :, token : token + 1])
            graph.replay()
            found.append(torch.stack(outs))
        result = torch.cat(found, 3)
        assert torch.equal(result[..., case.prompt :, :], eager[..., case.prompt :, :])
        case.check(result, cache)
    with pytest.raises(ValueError, match="room in every slot, but 500 "):
        case.step(attention, cache, 0)


@pytest.mark.gpu
def test_a_prefill_is_not_captured() -> None:
    case = Case(device="cuda", prompt=4, steps=1)
    cache = case.cache(0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="prefill before it"), torch.cuda.graph(graph):
        case.prefill(SplitKFlashAttn(), cache)


@pytest.mark.gpu
def test_the_memory_is_given_back() -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime
    case = Case(device="cuda", kv_heads=8, dim=128, prompt=4, steps=4000, layers=1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = case.cache(0.5)
    assert torch.cuda.memory_allocated() - before >= cache.tier_bytes[LOCAL]
    address = int(cache.tables.addresses[-1, 0])
    assert runtime.pointerGetAttributes(address).type == 1, "page-locked"
    size = cache.tier_bytes[LOCAL]
    cache.close()
    assert runtime.pointerGetAttributes(address).type != 1
    assert torch.cuda.memory_allocated() < before + size // 2
    with pytest.raises(CannotRun, match="is the GPU that runs"):
        case.cache(0.5, remote="peer:0")


@pytest.mark.gpu
def test_a_peer_as_the_remote_tier() -> None:
    peer = readable_peer()
    case = Case(device="cuda", padding=PADDING)
    here, there = case.cache(0), case.cache(1, remote=f"peer:{peer}")
    assert all(slot.device.index == peer for slot in there.slots_of(0))
    out = case.run(there)
    case.check(out, there)
    assert torch.equal(out, case.run(here))


@pytest.mark.gpu
def test_how_the_remote_tier_is_read() -> None:
    options: dict[str, Any] = {"dtype": torch.float16, "device": "cuda", "remote": "peer:1"}
    with pytest.raises(UsageError, match=r"h200-pcie5 .*'peer:1'"):
        PartitionedKVCache(2, 2, 64, 9, profile="h200-pcie5", **options)
    cache = PartitionedKVCache(2, 2, 64, 9, ratio=0, profile="h200-nvlink-peer", **options)
    assert cache.access[1].sms and cache.access[1].window_bytes
