"""Chains of kernels for `dakrun profile`: the launches, with stand-ins for a GPU's kernels."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cards import H200, PORTABLE

from dakrun.hardware import Sweep
from dakrun.lab.ceilings import MIB
from dakrun.lab.chain import Launch
from dakrun.lab.probe.attention_costs import attention_sweep, sampling_sweep
from dakrun.lab.probe.effort import QUICK
from dakrun.lab.probe.gemm_costs import (
    QUANTIZED_FORMATS,
    linear_sweep,
    many_rows_sweep,
    norm_sweep,
    quantized_sweep,
    staged_seconds,
)
from dakrun.lab.probe.sweeps import Bench
from dakrun.launches import GemmConfig, TierAccess
from dakrun.memory.matrix import TieredMatrix

SMS = 132
NORM_COLS, VOCABULARIES = (4096, 8192), (2**15, 2**17)
MANY_ROWS_WEIGHTS = (
    (512, 4096), (768, 4096), (2048, 4096), (3584, 4096), (512, 16384), (896, 7168), (2688, 7168),
    (3584, 7168),
)  # fmt: skip
LINEAR_S, ATTENTION_S, NORM_S, SELECT_S = 8e-6, 7e-6, 3e-6, 5e-6  # of a launch
FUSED_S = 1e-6  # of a norm in one
STAGED_S = 4e-6  # of a copy that is waited for


class Launches:
    """Records what each product and attention read, and checks operands; stands in for Products.

    A graph takes a fixed time for each launch in it, attention for each KV block; long slots take
    twice as long beside products.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.weights: list[range] = []
        self.slots: list[tuple[int, ...]] = []
        self.chains: list[list[range]] = []  # the weights of each graph
        self.attended_slots: list[list[tuple[int, ...]]] = []  # the slots of each graph
        self.written: torch.Tensor | None = None  # by the last launch, if it was attention
        self.attended = 0.0  # seconds
        self.norms = self.fused = self.selections = 0
        self.launched_before = 0  # chains

    def __call__(
        self,
        x: torch.Tensor,
        weight: TieredMatrix,
        accesses: tuple[TierAccess, ...],
        out: torch.Tensor,
        *,
        norm: str,
        eps: float,
        pdl: bool,
        ahead: torch.Tensor | None,
    ) -> None:
        assert weight.shape == (out.shape[1], x.shape[1]) and len(x) == len(out)
        assert len(accesses) == len(weight.parts) == 1 and eps == 1e-5
        assert norm == "none" or (norm == "layer" and len(x) <= 32)
        assert ahead is None or ahead.dtype == torch.uint8
        self.read(x, weight, pdl)
        self.fused += norm == "layer"

    def ahead(
        self, n: int, weight: TieredMatrix, accesses: tuple[TierAccess, ...]
    ) -> torch.Tensor | None:
        return None if n > 32 else weight.parts[0].arrays[0][:128]

    def read(self, x: torch.Tensor, weight: TieredMatrix, pdl: bool) -> None:
        assert pdl, "as in a decode step"
        assert self.written is None or self.written.data_ptr() == x.data_ptr()
        self.written = None
        for part in weight.parts:
            start = part.arrays[0].data_ptr()
            self.weights.append(range(start, start + part.nbytes))

    def normalize(
        self, x: torch.Tensor, out: torch.Tensor, norm: str, *, eps: float, pdl: bool
    ) -> None:
        assert x.data_ptr() == out.data_ptr() and (norm, eps, pdl) == ("layer", 1e-5, True)
        self.norms += 1

    def select_token(self, logits: torch.Tensor, *of_rows: torch.Tensor, pdl: bool) -> None:
        assert pdl and all(len(values) == len(logits) for values in of_rows)
        self.selections += 1

    def splitk_flash_attn(self, *operands: Any, scale: float, pdl: bool) -> None:
        q, k, v, tables, lengths, config, workspace, out = operands
        caches = tables.addresses[:, 0]
        assert pdl and workspace and scale == 128**-0.5
        slots = len(q)
        assert config.alone == (slots > 32), "behind products whose CTAs fill an SM"
        assert q.shape == k.shape == v.shape == (slots, 32, 128) and out.shape == (slots, 4096)
        assert lengths.tolist() == [config.shape.positions - 1] * slots
        size, end = config.shape.slot_bytes, self.memory.data_ptr() + self.memory.numel()
        for first, second in zip(caches.tolist(), caches.tolist()[1:], strict=False):
            assert second == first + size
        assert caches[0] >= self.memory.data_ptr() and caches[-1] + size <= end
        held = (ctypes.c_uint8 * size).from_address(int(caches[-1]))
        values = torch.frombuffer(held, dtype=torch.float16).float()
        assert values.std() == pytest.approx(1, rel=0.05)
        self.slots.append(tuple(caches.tolist()))
        self.written = out if self.weights else None
        beside = 2 if self.weights and config.shape.blocks > 1 else 1
        self.attended += ATTENTION_S * config.shape.blocks * beside

    def seconds(self, launch: Callable[[], None], runs: int, *, new: bool = True) -> list[float]:
        self.launched_before += not new
        return [self.launched(launch)] * runs

    def launched(self, launch: Callable[[], None]) -> float:
        self.weights.clear()
        self.slots.clear()
        self.norms = self.fused = self.selections = 0
        self.written, self.attended = None, 0.0
        launch()
        self.chains.append(list(self.weights))
        self.attended_slots.append(list(self.slots))
        linear = LINEAR_S * len(self.weights) + self.attended
        norms = NORM_S * self.norms + FUSED_S * self.fused
        return linear + norms + SELECT_S * self.selections


@pytest.fixture
def bench() -> Bench:
    """A buffer of 96 MiB: three of the small weights, and less than one of the large ones."""
    memory = torch.zeros(96 * MIB, dtype=torch.uint8)
    return Bench(H200, memory, replace(QUICK, rows=(3, 64), many_rows=(65, 130)))


@pytest.fixture
def launches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches(bench.hbm)
    # Kernels and CUDA graphs need a GPU.
    gemm, attention = "dakrun.lab.probe.gemm_costs", "dakrun.lab.probe.attention_costs"
    monkeypatch.setattr(f"{gemm}.normalize", found.normalize)
    monkeypatch.setattr(f"{gemm}.Products", lambda *_: found)
    monkeypatch.setattr(f"{attention}.list_items", lambda *_, **__: None)
    monkeypatch.setattr(f"{attention}.splitk_flash_attn", found.splitk_flash_attn)
    monkeypatch.setattr(f"{attention}.select_token", found.select_token)
    monkeypatch.setattr("dakrun.lab.chain.graph_seconds", found.seconds)
    monkeypatch.setattr("dakrun.lab.chain.recorded", lambda launch: SimpleNamespace(replay=launch))
    monkeypatch.setattr("dakrun.lab.chain.event_seconds", found.launched)
    monkeypatch.setattr("dakrun.lab.chain.MIN_SECONDS", 1e-4)
    monkeypatch.setattr("dakrun.lab.chain.LOAD_SECONDS", 0.0)
    return found


def points(sweep: Sweep, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*map(sweep.column, names), strict=True))


def test_products_read_one_weight_after_the_other(bench: Bench, launches: Launches) -> None:
    sweep = linear_sweep(bench)
    sizes = [32 * MIB, 96 * MIB // 114_688 * 114_688]  # whole row blocks of the large one
    assert points(sweep, "n", "op_bytes") == [(n, size) for n in (3, 64) for size in sizes]
    assert points(sweep, "op_s", "spread") == [(LINEAR_S, 0)] * 4
    _, small, _, large, *_ = launches.chains  # each chain is first timed when short
    start = bench.hbm.data_ptr()
    weights = [range(at, at + sizes[0]) for at in range(start, start + 96 * MIB, sizes[0])]
    assert small[:4] == [*weights, weights[0]] and len(small) * LINEAR_S >= 1e-4
    assert set(large) == {range(start, start + sizes[1])}


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_quantized_weights_take_their_own_bytes(
    name: str, bench: Bench, launches: Launches
) -> None:
    """With 16-bit scales per 128 columns, e2m1 with a byte per 16 and float32 per 128."""
    bits = {"int4": 4.125, "int4_zeros": 4.25, "e2m1": 4.75, "eight_bits": 8.25}[name]
    stored = QUANTIZED_FORMATS[name]
    sweep = quantized_sweep(bench, stored)
    row_bytes = stored.row_block_bytes(7168)
    large = min(3584, 96 * MIB // row_bytes) * row_bytes
    sizes = [512 * 8 * 4096 * bits / 8, large, 512 * 8 * 14336 * bits / 8]
    points_of = [(n, size) for n in (8, 16, 64, 130) for size in sizes]
    assert points(sweep, "n", "op_bytes") == points_of
    assert {len(weight) for chain in launches.chains for weight in chain} == set(sizes)


@pytest.mark.parametrize("most", [24, 36])
def test_attention_is_what_it_adds(bench: Bench, launches: Launches, most: int) -> None:
    """Short slots beside products, long ones alone."""
    launches.memory = torch.zeros(4 * most * MIB, dtype=torch.uint8)
    sweep = attention_sweep(replace(bench, hbm=launches.memory))
    long = 2 * most // 8
    assert points(sweep, "n", "op_bytes") == [
        (8, 8 * MIB), (8, 8 * long * MIB), (most, most * MIB), (most, 2 * most * MIB),
    ]  # fmt: skip
    assert sweep.column("op_s") == pytest.approx([ATTENTION_S * n for n in (1, long, 1, 2)])
    half = launches.memory.data_ptr() + 2 * most * MIB
    assert all(weight.stop <= half for chain in launches.chains for weight in chain)
    assert all(half <= slots[0] for slots in launches.slots)


def test_attention_is_beside_the_products_of_a_step(bench: Bench, launches: Launches) -> None:
    attention_sweep(replace(bench, effort=replace(bench.effort, slots=(8,))))
    size = 64 * 2**10  # of a row block
    for chain_ in launches.chains:
        sizes = [len(weight) for weight in chain_]
        assert sizes[::2] == [576 * size] * len(sizes[::2])
        assert sizes[1::2] == [192 * size] * len(sizes[::2])


def test_short_slots_are_many(bench: Bench, launches: Launches) -> None:
    """The chain of short slots alone cycles through all sets of slots in half of the buffer."""
    attention_sweep(replace(bench, effort=replace(bench.effort, slots=(8,))))
    sets = launches.attended_slots[-2]
    assert len(set(sets[:6])) == len(set(sets)) == 6 and len(sets) > 6
    assert sets[6:] == [sets[number % 6] for number in range(6, len(sets))]


def test_chains_are_recorded_without_being_launched_again(bench: Bench, launches: Launches) -> None:
    linear_sweep(bench)
    assert launches.launched_before == 4 and len(launches.chains) == 8


def test_products_of_many_rows_have_their_turns(bench: Bench, launches: Launches) -> None:
    sweep = many_rows_sweep(bench)
    room = 96 * MIB
    sizes = [min(o, room // (16 * cols)) * 16 * cols for o, cols in MANY_ROWS_WEIGHTS]
    assert points(sweep, "n", "op_bytes") == [(n, size) for n in (65, 130) for size in sizes]
    assert points(sweep, "op_s", "spread") == [(LINEAR_S, 0)] * len(sizes) * 2
    turns = launches.chains[-len(sizes) :]
    assert [len(chain[0]) for chain in turns] == sizes
    for chain_, before in zip(turns, launches.chains[-2 * len(sizes) :], strict=False):
        assert chain_ == before and len(chain_) * LINEAR_S >= 1e-4


def test_where_torch_computes_fewer_rows_are_many(bench: Bench, launches: Launches) -> None:
    assert set(many_rows_sweep(replace(bench, card=PORTABLE)).column("n")) == {130}


def test_a_norm_is_what_it_adds(bench: Bench, launches: Launches) -> None:
    sweep = norm_sweep(bench)
    sizes = [(n, 4 * n * cols) for n in (3, 64, 65, 130) for cols in NORM_COLS]
    assert points(sweep, "n", "op_bytes") == sizes
    assert sweep.column("op_s") == pytest.approx([FUSED_S] * 2 + [NORM_S] * 6)


def test_sampling_reads_all_logits(bench: Bench, launches: Launches) -> None:
    bench = replace(bench, effort=replace(bench.effort, slots=(2, 8)))
    sweep = sampling_sweep(bench)
    sizes = [(n, 2 * n * v) for n in (2, 8) for v in VOCABULARIES]
    assert points(sweep, "n", "op_bytes") == sizes
    assert sweep.column("op_s") == pytest.approx([SELECT_S] * 4)


def test_few_logits_are_enough(
    bench: Bench, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def seconds(launch: Launch, operands: int, *, replays: int) -> list[float]:
        counts.append(operands)
        return [1.0] * replays

    # Counts operands, of fewer logits than fit a GPU.
    monkeypatch.setattr("dakrun.lab.probe.attention_costs.launch_seconds", seconds)
    monkeypatch.setattr("dakrun.lab.probe.attention_costs.MAX_LOGITS", 50)
    sampling_sweep(replace(bench, effort=replace(bench.effort, slots=(8, 64))))
    assert counts == [50, 48, 24, 6]


class Staging:
    """A stand-in for the engine's Staging that records what is fetched."""

    def __init__(
        self, matrices: dict[str, TieredMatrix], staged: list[str], ring: torch.Tensor, *,
        together: int,
    ) -> None:  # fmt: skip
        sizes = [sum(part.nbytes for part in w.parts[1:]) for w in matrices.values()]
        assert list(matrices) == staged and ring.numel() >= 2 * max(sizes) and together == 1
        self.matrices, self.fetched, self.filled = matrices, list[str](), False

    def fill(self) -> None:
        self.filled = True

    def begin(self) -> None:
        assert self.filled
        self.fetched.clear()

    def end(self) -> None:
        assert self.fetched == list(self.matrices)

    def fetch(self, name: str) -> TieredMatrix:
        self.fetched.append(name)
        return self.matrices[name]

    def release(self, name: str) -> None:
        assert self.fetched[-1] == name

    def waits(self, name: str) -> bool:
        return False  # the stand-in's products check for PDL


def test_staging_is_what_it_adds(
    bench: Bench, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = torch.zeros(3 * MIB, dtype=torch.uint8), launches.memory
    remote = range(far.data_ptr(), far.data_ptr() + far.numel())

    def seconds(launch: Callable[[], None], runs: int) -> list[float]:
        launch_s = launches.launched(launch)
        parts = [weight.start for weight in launches.weights]
        copied = sum(start in remote for start in parts)
        assert copied in (0, len(parts) // 2) and len(near) >= 96 * MIB
        return [launch_s + STAGED_S * copied] * runs

    def product(
        x: torch.Tensor, weight: TieredMatrix, config: GemmConfig, out: torch.Tensor, *,
        pdl: bool,
    ) -> None:  # fmt: skip
        assert config.splits == tuple(part.split for part in weight.parts)
        launches.read(x, weight, pdl)

    # Kernels, copies and graphs need a GPU, and the CPU a smaller weight.
    monkeypatch.setattr("dakrun.lab.probe.gemm_costs.splitk_gemm", product)
    monkeypatch.setattr("dakrun.lab.probe.gemm_costs.Staging", Staging)
    monkeypatch.setattr("dakrun.lab.probe.gemm_costs.graph_seconds", seconds)
    monkeypatch.setattr("dakrun.lab.probe.gemm_costs.WEIGHT_ROW_BLOCKS", 64)
    found = staged_seconds(bench, far)
    assert found == pytest.approx([STAGED_S] * bench.effort.runs)
