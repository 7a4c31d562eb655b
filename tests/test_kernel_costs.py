"""Chains of kernels for `dakrun profile`: what is launched, with stand-ins for a GPU's kernels."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dakrun.hardware import Sweep
from dakrun.kernels.attention import Workspace
from dakrun.kernels.attention_heuristics import AttentionConfig
from dakrun.kernels.heuristics import GemmConfig
from dakrun.kernels.packing import PackedTensor
from dakrun.probe import chain, kernel_costs
from dakrun.probe.effort import MIB, QUICK
from dakrun.probe.sweeps import Bench, Buffer

SMS = 132
LINEAR_S, ATTENTION_S = 8e-6, 7e-6  # of a launch


class Launches:
    """Launches that a CPU makes note of, checking operands: what each product and attention read.

    A graph takes LINEAR_S and ATTENTION_S for each launch in it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.weights: list[range] = []
        self.slots: list[tuple[int, ...]] = []
        self.chains: list[list[range]] = []  # the weights of each graph
        self.written: torch.Tensor | None = None

    def splitk_gemm(
        self,
        x: torch.Tensor,
        weight: PackedTensor,
        config: GemmConfig,
        out: torch.Tensor,
        *,
        overlap: bool,
    ) -> None:
        assert overlap and config.splits == tuple(part.split for part in weight.parts)
        assert weight.shape == (out.shape[1], x.shape[1]) and len(x) == len(out)
        assert not config.half_cols, "as in a decode step"
        (part,) = weight.parts
        self.weights.append(range(part.data.data_ptr(), part.data.data_ptr() + part.data.numel()))
        if self.slots:
            assert self.written is not None and self.written.data_ptr() == x.data_ptr()

    def splitk_flash_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        caches: torch.Tensor,
        lengths: torch.Tensor,
        config: AttentionConfig,
        workspace: Workspace,
        out: torch.Tensor,
        *,
        scale: float,
        overlap: bool,
    ) -> None:
        assert overlap and workspace and scale == 128**-0.5
        assert q.shape == k.shape == v.shape == (8, 32, 128) and out.shape == (8, 4096)
        assert lengths.tolist() == [config.shape.positions - 1] * 8
        size, end = config.shape.slot_bytes, self.memory.data_ptr() + self.memory.numel()
        for first, second in zip(caches.tolist(), caches.tolist()[1:], strict=False):
            assert second == first + size
        assert caches[0] >= self.memory.data_ptr() and caches[-1] + size <= end
        held = (ctypes.c_uint8 * size).from_address(int(caches[-1]))
        values = torch.frombuffer(held, dtype=torch.float16).float()
        assert values.std() == pytest.approx(1, rel=0.05)
        self.slots.append(tuple(caches.tolist()))
        self.written = out

    def seconds(self, launch: Callable[[], None], runs: int) -> list[float]:
        self.weights.clear()
        self.slots.clear()
        launch()
        self.chains.append(list(self.weights))
        return [LINEAR_S * len(self.weights) + ATTENTION_S * len(self.slots)] * runs


@pytest.fixture
def bench() -> Bench:
    """A buffer of 96 MiB: three of the small weights, and less than one of the large ones."""
    memory = torch.zeros(96 * MIB, dtype=torch.uint8)
    return Bench(SMS, Buffer(memory), replace(QUICK, rows=(3, 64)))


@pytest.fixture
def launches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches(bench.hbm.tensor)
    monkeypatch.setattr(kernel_costs, "splitk_gemm", found.splitk_gemm)
    monkeypatch.setattr(kernel_costs, "splitk_flash_attn", found.splitk_flash_attn)
    monkeypatch.setattr(chain, "graph_seconds", found.seconds)
    monkeypatch.setattr(chain, "LEAST_SECONDS", 1e-4)
    return found


def points(sweep: Sweep, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*map(sweep.column, names), strict=True))


def test_products_read_one_weight_after_the_other(bench: Bench, launches: Launches) -> None:
    sweep = kernel_costs.linear_sweep(bench)
    sizes = [32 * MIB, 96 * MIB // 114_688 * 114_688]  # whole octets of the large one
    assert points(sweep, "n", "op_bytes") == [(n, size) for n in (3, 64) for size in sizes]
    assert points(sweep, "op_s", "spread") == [(LINEAR_S, 0)] * 4
    _, small, _, large, *_ = launches.chains  # each chain is first timed when short
    start = bench.hbm.tensor.data_ptr()
    weights = [range(at, at + sizes[0]) for at in range(start, start + 96 * MIB, sizes[0])]
    assert small[:4] == [*weights, weights[0]] and len(small) * LINEAR_S >= 1e-4
    assert set(large) == {range(start, start + sizes[1])}


def test_attention_is_what_it_adds(bench: Bench, launches: Launches) -> None:
    sweep = kernel_costs.attention_sweep(bench)
    assert points(sweep, "n", "op_bytes") == [(8, 8 * MIB), (8, 48 * MIB)]
    assert sweep.column("op_s") == pytest.approx([ATTENTION_S] * 2)
    assert len(launches.weights) == len(launches.slots) >= 7
    half = bench.hbm.tensor.data_ptr() + 48 * MIB
    assert all(weight.stop <= half for weight in launches.weights)
    assert all(half <= slots[0] for slots in launches.slots)


def test_short_slots_are_many(bench: Bench, launches: Launches) -> None:
    memory = kernel_costs._random_memory(bench)
    launch = kernel_costs._attention(bench, memory, 1, memory.new_empty(8, 4096))
    for number in range(13):
        launch(number)
    assert len(set(launches.slots)) == 12 and launches.slots[12] == launches.slots[0]
