"""Embedding, norms, unpacking and sampling one after the other, each on what the one before wrote:
launches that overlap, eagerly or in a graph, change no bit.
"""

from collections.abc import Callable

import pytest
import torch
from packed_matrices import normal, packed

from dakrun.formats import Split
from dakrun.kernels import embed, normalize, select_token, unpack
from dakrun.kernels.runtime import DTYPES

pytestmark = pytest.mark.gpu
STEPS, WIDTH = 12, 2120  # logits are a norm's output, so there are as many tokens as columns
SPLITS = (Split(200, 13, 4, 512), Split(65, 8, 3, 256))
PIECE = 24


class Chain:
    """Steps of `rows` rows, the second of which has no request, and all that they write."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        dense = normal(WIDTH, WIDTH, dtype=dtype, device="cuda")
        self.table = packed(dense, SPLITS)
        self.positions = normal(64, WIDTH, dtype=dtype, device="cuda")
        self.weight = normal(WIDTH, dtype=dtype, device="cuda")
        self.slots = torch.randperm(rows, dtype=torch.int32, device="cuda")
        self.first = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.x, self.logits = dense[:rows].clone(), dense[:rows].clone()
        self.piece, self.normed = dense[:PIECE].clone(), dense[:PIECE].clone()
        self.tokens, self.lengths = self.first.clone(), self.first.clone()
        self.log = torch.zeros(rows, STEPS, dtype=torch.int32, pin_memory=True)

    def reset(self) -> None:
        """Poison what is written, and begin anew."""
        torch.cuda.synchronize()
        for written in (self.x, self.logits, self.piece, self.normed):
            written.fill_(torch.nan)
        self.tokens.copy_(self.first)
        self.lengths.copy_(self.first)
        self.lengths[1] = -1
        self.log.fill_(-1)

    def run(self, *, pdl: bool) -> None:
        for step in range(STEPS):
            embed(
                self.tokens, self.table, self.x, positions=self.positions, lengths=self.lengths,
                offset=2, pdl=pdl,
            )  # fmt: skip
            unpack(self.table, self.piece, first_row=PIECE * step, pdl=pdl)
            normalize(self.piece, self.normed, "layer", eps=1e-5, pdl=pdl)
            normalize(self.x, self.logits, "rms", eps=1e-5, weight=self.weight, pdl=pdl)
            select_token(self.logits, self.tokens, self.lengths, self.slots, self.log, pdl=pdl)

    def written(self) -> list[torch.Tensor]:
        """All of it, as it is now."""
        torch.cuda.synchronize()
        kept = (self.x, self.logits, self.piece, self.normed, self.tokens, self.lengths, self.log)
        return [tensor.cpu().clone() for tensor in kept]


def same(run: Callable[[], None], chain: Chain, expected: list[torch.Tensor]) -> bool:
    chain.reset()
    run()
    return all(map(torch.equal, chain.written(), expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 48])
def test_overlapping_launches_change_no_bit(rows: int, dtype: torch.dtype) -> None:
    chain = Chain(rows, dtype)
    chain.reset()
    chain.run(pdl=False)
    expected = chain.written()
    assert not any(bool(tensor.isnan().any()) for tensor in expected)
    assert expected[5].tolist() == [-1 if row == 1 else row + STEPS for row in range(rows)]
    for _ in range(20):
        assert same(lambda: chain.run(pdl=True), chain, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(pdl=True)
    for _ in range(100):
        assert same(graph.replay, chain, expected)
