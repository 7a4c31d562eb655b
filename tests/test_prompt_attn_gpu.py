"""Prompt attention on a GPU: as exact as torch's, the same bits beside others and in a graph."""

from collections.abc import Sequence

import pytest
import torch
from packed_linear import moved
from prompt_cases import LAYER, PromptCase

from dakrun.kernels.attention import prompt_attn

pytestmark = pytest.mark.gpu
SEGMENTS = [(0, 700), (1055, 1), (64, 130), (4000, 9), (63, 65), (2048, 33), (1, 2)]


def on_the_gpu(
    segments: Sequence[tuple[int, int]], group: int, dim: int, dtype: torch.dtype
) -> PromptCase:
    return PromptCase(segments, 4, group, dim, dtype, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_it_is_exact(dim: int, group: int, dtype: torch.dtype) -> None:
    case = on_the_gpu(SEGMENTS, group, dim, dtype)
    case.check(case.run(), 2e-3 if dtype == torch.float16 else 1.6e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_it_is_as_exact_as_torch(dim: int, dtype: torch.dtype) -> None:
    """Errors against float64 are at most twice those of torch's fused attention."""
    case = on_the_gpu([(1000, 2000)], 4, dim, dtype)
    q = case.qkv[1:2001, :16].transpose(0, 1)[None]
    keys, values = (part.cuda()[None] for part in case.caches[0])
    seen = torch.ones(2000, 3000, dtype=torch.bool, device="cuda").tril(1000)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *qkv, attn_mask=seen, enable_gqa=True
        )

    exact = attend(q.double(), keys.double(), values.double())
    found = case.run()[1:2001].view(2000, 16, dim).transpose(0, 1)
    assert (found - exact).norm() <= 2 * (attend(q, keys, values) - exact).norm()


@pytest.mark.parametrize("group", [1, 4])
def test_no_bit_depends_on_other_requests(group: int) -> None:
    case = on_the_gpu(SEGMENTS, group, 128, torch.float16)
    wanted = case.run()
    for number, (row, (_, length)) in enumerate(zip(case.starts, SEGMENTS, strict=True)):
        for order in ([number], [*range(number, len(SEGMENTS))]):
            found = case.run(case.work(order))[row : row + length]
            assert torch.equal(found, wanted[row : row + length]), order


def test_keys_and_values_in_host_memory() -> None:
    case = on_the_gpu(SEGMENTS, 4, 128, torch.float16)
    wanted, before = case.run(), case.blocks
    case.blocks = moved(before.flatten(), "host").view(before.shape)
    case.tables.addresses.add_(case.blocks.data_ptr() - before.data_ptr())
    assert torch.equal(case.run().view(torch.int16), wanted.view(torch.int16))


def test_a_graph_replays_other_work() -> None:
    """A graph's launches read the tiles and their number from the device; launches may overlap."""
    case = on_the_gpu(SEGMENTS, 4, 128, torch.float16)
    work, other = case.work(), case.work([1, 3, 6])
    q = case.qkv[:, :16]
    out = torch.empty(len(q), 16 * 128, dtype=q.dtype, device="cuda")

    def launches() -> None:
        for _ in range(5):
            prompt_attn(q, case.tables, work, out, layer=LAYER, scale=128**-0.5, pdl=True)

    wanted = [case.run(case.work()), case.run(other)]
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    for source, expected in ((case.work(), wanted[0]), (other, wanted[1])):
        work.tiles[: len(source.tiles)] = source.tiles
        work.count.copy_(source.count)
        for _ in range(10):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert not work.arrivals.any()
