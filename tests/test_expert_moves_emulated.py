"""Exchanges of experts as a run goes, on the kernels: no token changes."""

import ctypes
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_graph_runner_emulated import CONFIGS, graphs
from test_kernel_decoder import CARD, CPU, ROOM, config_of, launched, staging
from tiny_models import save_half

from dakrun.config import SamplingParams, Workload
from dakrun.engine import (
    DecodeStep,
    Engine,
    ExpertCopies,
    GraphRunner,
    KernelBackend,
    PassStaging,
    Prefill,
    expert_copies,
    expert_moves,
    graph_runner,
    tier_accesses,
)
from dakrun.engine.kv_cache import KVCache
from dakrun.hardware import load_profile
from dakrun.kernels.attention import KVShape
from dakrun.kernels.runtime import copy
from dakrun.memory.matrix import TieredMatrix
from dakrun.memory.tiers import allocate_tiers
from dakrun.models import decoder_of
from dakrun.plan import Policy, kv_positions, make_plan
from dakrun.requests import Completion, Request
from dakrun.weights import Checkpoint, Packing, load, tier_capacities

__all__ = ["graphs", "launched"]  # fixtures that all tests use
BATCH, PIECE, EXPERTS = 2, 40_000, 12
FEW = 5  # tokens of a pass that stages nothing


def skewed(path: Path) -> Path:
    """A checkpoint whose routers like the experts that are stacked last."""
    model = save_half(CONFIGS["glm4-moe"], path)
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.linspace(0.6, 0, len(tensor))
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def engine_of(path: Path, ratio: float, *, stages: bool = False) -> Engine:
    """An engine whose experts may move, `ratio` of whose bytes are remote.

    Passes of more than FEW tokens of prompts stage all matrices; so do full steps that `stages`.
    """
    config = config_of(path)
    work = Workload(batch_size=BATCH, prompt_len=16, new_tokens=8, max_model_len=100)
    policy = Policy(
        hbm_budget=2**30, host_budget=2**30, offload_ratio=ratio, kv_offload_ratio=0.0,
        transport="direct", strategy="uniform",
    )  # fmt: skip
    plan = make_plan(config, work, load_profile("h200-pcie5"), policy)
    tiers = allocate_tiers(tier_capacities(plan, packed=True), CPU)
    accesses = tier_accesses(plan, CARD)
    shape = KVShape(config.num_kv_heads, config.head_dim, kv_positions(work))
    cache = KVCache(plan.kv_placement(), config.num_layers, shape, tiers, CPU)
    with Checkpoint(path) as source:
        source.check(decoder_of(config))
        weights = load(source, plan, tiers, CPU, packing=Packing(accesses, CARD))
    backend = KernelBackend(decoder_of(config), weights, accesses, shape.positions)
    steps = PassStaging(staging(backend, early=True), None, 1) if stages else None
    step = DecodeStep(backend.with_buffers(BATCH, steps), cache, shape, accesses["attention"])
    room = torch.empty(ROOM, dtype=torch.uint8)
    stagings = PassStaging(staging(backend), None, FEW) if ratio else None
    passes = backend.with_buffers(128 + BATCH, stagings, logits=False, prompts=True)
    prefill = Prefill(passes, cache, shape, room, 128)
    copies = None
    if (tables := backend.expert_tables) is not None:
        assert backend.expert_use
        of_expert = expert_moves.matrices_at(backend.expert_use.mixtures[0], backend.matrices, 0)
        spare = torch.full((2 * sum(one.nbytes for one in of_expert),), 0x7F, dtype=torch.uint8)
        copies = ExpertCopies(backend.expert_use, backend.matrices, tables, spare, 2, 1e9)
    return Engine(GraphRunner(step, prefill, cache, shape, copies), plan, None)


def run(engine: Engine) -> dict[str, tuple[int, ...]]:
    requests = [
        Request(
            id=str(i), line=i + 1, prompt_ids=tuple(range(5 + i, 8 + 3 * i)),
            params=SamplingParams(max_tokens=12 + 3 * i, ignore_eos=True),
        )
        for i in range(4)
    ]  # fmt: skip
    found = {}
    for one in engine.generate(requests):
        assert isinstance(one, Completion), one
        found[one.id] = one.token_ids
    return found


def moving_soon(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """A checkpoint, and the tokens of a run in which no expert is remote.

    In later runs experts move soon, and in pieces; with `late` copies are made when waited for.
    """
    monkeypatch.setattr(expert_moves, "WINDOW", 4)
    monkeypatch.setattr(expert_moves, "SIGNIFICANT", 1.0)
    monkeypatch.setattr(expert_copies, "LEAST_COPY", PIECE)
    path = skewed(folder / "model")
    wanted = run(engine_of(path, 0.0))
    if late:
        monkeypatch.setattr(expert_copies, "CopyStream", LateStream)
    return path, wanted


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.full), True])
def test_tokens_are_those_of_experts_that_stay(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are as early as the stream of steps lets them be, or as late, and take several steps.

    At the end the local tier has the experts of most use, and every index the bytes of its expert.
    """
    path, wanted = moving_soon(tmp_path, monkeypatch, late=late)
    check(path, wanted)


@pytest.mark.full
@pytest.mark.parametrize("late", [False, True])
def test_steps_copy_experts_where_they_lie(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full steps copy all remote experts ahead of their use; those of one row let them move."""
    path, wanted = moving_soon(tmp_path, monkeypatch, late=late)
    engine = engine_of(path, 0.5, stages=True)
    runner = engine.runner
    assert isinstance(runner, GraphRunner) and runner._moves
    steps = runner._backend.stagings
    assert steps.has_experts(BATCH) and not steps.has_experts(1) and steps.most
    read, fetch = list[int](), steps.most.fetch

    def checked(name: str) -> TieredMatrix:
        remote = runner._backend.matrices[name].parts[1:]
        copied = fetch(name)
        for part, home in zip(copied.parts[1:], remote, strict=True):
            assert all(map(torch.equal, part.arrays, home.arrays))
        if "experts" in name:
            read.append(runner._moves.exchanged)
        return copied

    monkeypatch.setattr(steps.most, "fetch", checked)
    for _ in range(3):
        assert run(engine) == wanted
    assert len(set(read)) > 1, "experts moved between steps that copy them"


def test_steps_that_only_measure_count_no_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "replay_seconds", lambda launches: len(launches()))
    engine = engine_of(skewed(tmp_path / "model"), 0.0)
    assert engine.op_seconds(9)["experts_down"] == 1, "measured in the one layer with experts"
    assert engine.runner.expert_use is not None
    assert not engine.runner.expert_use.table.any()


class LateStream:
    """Copies that are made when something waits for them."""

    def __init__(self, _: torch.device) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def follow(self) -> None: ...

    def copy(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._pending += pairs

    def copied(self) -> None: ...

    def join(self) -> None:
        while self._pending:
            copy(*self._pending.pop(0))


def check(path: Path, wanted: dict[str, tuple[int, ...]]) -> None:
    """Run with half of the weights in the remote tier, which most passes of prompts stage."""
    engine = engine_of(path, 0.5)
    runner = engine.runner
    assert (
        isinstance(runner, GraphRunner) and runner.expert_use and runner._moves and runner._copies
    )
    use, matrices = runner.expert_use, runner._backend.matrices
    (mixture,), order = use.mixtures, list(use.orders[0])
    homes = [expert_moves.matrices_at(mixture, matrices, index) for index in range(EXPERTS)]
    before = [[one.arrays[0].clone() for one in of] for of in homes]
    tiers = expert_moves.tiers_of_stack(mixture, matrices)
    assert run(engine) == wanted
    moved = runner.details()["expert_moves"]
    assert moved["exchanged_pairs"] >= 3 and moved["bytes"] >= 6 * PIECE
    while runner._moves.moving:
        runner._copies.allow(None)
        runner._moves.between_steps(settle=True)
    counts = [use.counts()[0][expert] for expert in use.orders[0]]
    local, remote = ([n for n, at in zip(counts, tiers, strict=True) if at == t] for t in (0, 1))
    assert sum(local) / len(local) > 2 * sum(remote) / len(remote)
    assert sorted(use.orders[0]) == sorted(order) and use.orders[0] != order
    for index, home in enumerate(homes):
        for one, part, then in zip(
            (mixture.up, mixture.down),
            home,
            before[order.index(use.orders[0][index])],
            strict=False,
        ):
            shift = int(matrices[one.name].shifts[index])
            assert not shift or tiers[index] == 0
            lies = (ctypes.c_uint8 * part.nbytes).from_address(part.arrays[0].data_ptr() + shift)
            assert torch.frombuffer(lies, dtype=torch.uint8).equal(then)
