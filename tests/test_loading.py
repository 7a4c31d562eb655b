"""Weights in their tiers as the GPU's kernels read them: packed, norms folded in, gates in turn.

Expected values are float64 arithmetic on the tensors of the file. All of it runs on a CPU, too.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cards import hopper
from safetensors.torch import save_file

from dakrun.config import ModelConfig, Workload
from dakrun.engine import tier_accesses
from dakrun.errors import CannotRun
from dakrun.hardware import load_profile
from dakrun.kernels.runtime import DTYPES
from dakrun.memory.tiers import allocate_tiers
from dakrun.models import Linear, Matrix, Norm, Operand, Source, decoder_of, known_model
from dakrun.plan import Plan, Policy, make_plan
from dakrun.weights import (
    Checkpoint,
    Dummy,
    Packing,
    Weights,
    load,
    loading,
    streaming,
    tier_capacities,
    unreadable,
)

CPU = torch.device("cpu")
CARD = hopper(5)
_COMMON = {
    "vocab_size": 331, "hidden_size": 136, "ffn_size": 392, "num_layers": 2, "num_heads": 4,
    "max_positions": 64, "embed_size": 136,
}  # fmt: skip
_OPT = _COMMON | {"family": "opt", "num_kv_heads": 4, "head_dim": 34}
CONFIGS = {
    "llama": ModelConfig(
        name="llama", family="llama", num_kv_heads=2, head_dim=24, tied_embeddings=False,
        attention_bias=True, mlp_bias=True, **_COMMON,
    ),
    "llama-tied": ModelConfig(
        name="llama-tied", family="llama", num_kv_heads=4, head_dim=24, tied_embeddings=True,
        **_COMMON,
    ),
    "opt": ModelConfig(
        name="opt", tied_embeddings=True, attention_bias=True,
        mlp_bias=True, **_OPT,
    ),
    "opt-no-bias": ModelConfig(
        name="opt-no-bias", tied_embeddings=False, **_OPT
    ),
    "opt-no-affine": ModelConfig(
        name="opt-no-affine", tied_embeddings=False,
        norm_affine=False, **_OPT,
    ),
    "opt-post-norm": ModelConfig(
        name="opt-post-norm", tied_embeddings=True, pre_norm=False,
        final_norm=False, **(_OPT | {"embed_size": 72}),
    ),
}  # fmt: skip
NAMES = list(CONFIGS)


def plan_of(name: str, dtype: torch.dtype = torch.float16, policy: Policy | None = None) -> Plan:
    config = CONFIGS[name].with_dtype(str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    workload = Workload(batch_size=2, prompt_len=8, new_tokens=8, max_model_len=16)
    profile = load_profile("h200-nvlink-peer")
    return make_plan(config, workload, profile, policy or Policy(offload_ratio=0.4))


def tensors_of(name: str, *dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors of a checkpoint, of the given dtypes in turn; weights of norms are near 1."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model, found = decoder_of(CONFIGS[name]), {}
    turns = itertools.cycle(dtypes)
    for operand in (*model.matrices(), *model.vectors()):
        for source, shape, *_ in operand.sources:
            values = torch.randn(shape, generator=generator) / 8
            if len(shape) == 1 and source.endswith("weight"):
                values += 1
            found[source] = values.to(next(turns))
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a matrix is many pieces, in more requests than there are buffers."""
    monkeypatch.setattr(loading, "PIECE_ELEMENTS", 40 * 136)
    monkeypatch.setattr(streaming, "SLICE_BYTES", 1000)


def packed(
    name: str, plan: Plan, source: Checkpoint | Dummy, device: torch.device = CPU
) -> Weights:
    """Loaded into memory that just holds it."""
    tiers = allocate_tiers(tier_capacities(plan, packed=True), device)
    packing = Packing(tier_accesses(plan, CARD), CARD)
    source.check(decoder_of(plan.model))
    weights = load(source, plan, tiers, device, packing=packing)
    for number, tier in enumerate(tiers.values()):
        kv = plan.op("attention").resident_bytes(number)
        assert kv <= tier.free < kv + 256
    return weights


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


def save(name: str, directory: Path, *dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    """Write a checkpoint of two files; its tensors in float64."""
    tensors = tensors_of(name, *dtypes)
    for number in range(2):
        some = {key: tensors[key] for key in list(tensors)[number::2]}
        save_file(some, directory / f"model-{number}.safetensors")
    return {key: tensor.double() for key, tensor in tensors.items()}


def stacked(operand: Operand, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = [tensors[source] for source, *_ in operand.sources]
    if operand.interleaved:
        out = parts[0].new_empty(2 * len(parts[0]), *parts[0].shape[1:])
        out[0::2], out[1::2] = parts
        return out
    return torch.cat(parts)


def assert_rounded(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Rounded once: by half a unit in the last place, and float32's error before that."""
    half = torch.finfo(got.dtype).eps / 2
    error = (got.double() - exact).abs()
    assert (error <= (half + 2e-6) * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_matrices_biases_and_norms(name: str, dtype: torch.dtype, directory: Path) -> None:
    stored = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
    tensors, model = save(name, directory, *stored), decoder_of(CONFIGS[name])
    with Checkpoint(directory) as source:
        weights = packed(name, plan_of(name, dtype), source)
    biases = {matrix.bias_name for matrix in model.matrices()}
    for vector in model.vectors():
        if vector.name not in biases:
            found = weights.resident[vector.name]
            assert torch.equal(found, stacked(vector, tensors).to(dtype))
    assert list(weights.matrices) == [matrix.name for matrix in model.matrices()]
    for matrix in model.matrices():
        got, norm = weights.matrices[matrix.name], matrix.folded
        assert got.for_kernels and [part.tier for part in got.parts] == ["hbm", "host"]
        exact, bias = stacked(matrix, tensors), None
        if isinstance(matrix, Linear) and matrix.bias:
            bias = stacked(matrix.bias, tensors)
        if norm and norm.bias:
            bias = exact @ stacked(norm.bias, tensors) + (0 if bias is None else bias)
        if norm and norm.weight:
            exact = exact * stacked(norm.weight, tensors)
        if norm and norm.kind == "layer":
            exact = exact - exact.mean(1, keepdim=True)
        assert_rounded(got.dense(), exact)
        assert (bias is None) == (matrix.bias_name not in weights.resident)
        if bias is not None:
            assert_rounded(weights.resident[matrix.bias_name], bias)


def folded(name: str) -> dict[str, Norm]:
    matrices = decoder_of(CONFIGS[name]).matrices()
    return {matrix.name: matrix.folded for matrix in matrices if matrix.folded}


def test_what_is_folded() -> None:
    both = {f"layers.{i}.{op}" for i in range(2) for op in ("qkv", "gate_up")}
    opt = {f"layers.{i}.{op}" for i in range(2) for op in ("qkv", "fc1")}
    assert {name: set(folded(name)) for name in NAMES} == {
        "llama": {*both, "lm_head"},
        "llama-tied": both,
        "opt": opt,
        "opt-no-bias": {*opt, "lm_head"},
        "opt-no-affine": {*opt, "lm_head"},
        "opt-post-norm": set(),
    }
    for norm, kind, vectors in (
        (folded("opt")["layers.1.fc1"], "layer", ["weight", "bias"]),
        (folded("opt-no-affine")["lm_head"], "layer", []),
        (folded("llama")["layers.1.gate_up"], "rms", ["weight"]),
    ):
        assert norm.kind == kind
        names = [vector.name for vector in norm.vectors()]
        assert names == [f"layers.1.ffn_norm.{vector}" for vector in vectors]


@pytest.mark.parametrize("name", ["llama", "opt", "opt-no-bias", "opt-no-affine"])
def test_a_folded_norm_only_scales_rows(name: str, directory: Path) -> None:
    tensors = save(name, directory, torch.float32)
    with Checkpoint(directory) as source:
        weights = packed(name, plan_of(name), source)
    x = torch.randn(5, 136, dtype=torch.float64) + 0.5
    for matrix in decoder_of(CONFIGS[name]).matrices():
        if not (isinstance(matrix, Linear) and matrix.folded):
            continue
        weight, bias = stacked(matrix, tensors), matrix.bias_name
        vectors = [stacked(vector, tensors) for vector in matrix.folded.vectors()]
        if matrix.folded.kind == "rms":
            normed, scale = F.rms_norm(x, (136,), vectors[0], 1e-5), x.pow(2).mean(1)
        else:
            normed, scale = F.layer_norm(x, (136,), *vectors), x.var(1, correction=0)
        plain = stacked(matrix.bias, tensors) if matrix.bias else 0
        dense = weights.matrices[matrix.name].dense().double()
        got = x @ dense.T * (scale + 1e-5).rsqrt()[:, None]
        got += weights.resident[bias].double() if bias in weights.resident else 0
        torch.testing.assert_close(got, normed @ weight.T + plain, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(offload_ratio=0.0),
        Policy(offload_ratio=1.0),
        Policy(offload_ratio=0.7, remote=("host", "peer:1")),
    ],
)
def test_tiers_may_be_empty_or_several(policy: Policy, directory: Path) -> None:
    save("llama", directory, torch.float16)
    with Checkpoint(directory) as source:
        here = packed("llama", plan_of("llama"), source)
        there = packed("llama", plan_of("llama", policy=policy), source)
    counts = {
        name: [part.split.row_blocks for part in m.parts] for name, m in there.matrices.items()
    }
    assert len({len(row_blocks) for row_blocks in counts.values()}) == 1
    assert all(row_blocks[0] == 0 for row_blocks in counts.values()) == (
        policy.offload_ratio == 1.0
    )
    assert all(sum(row_blocks[1:]) == 0 for row_blocks in counts.values()) == (
        policy.offload_ratio == 0.0
    )
    for name, matrix in there.matrices.items():
        assert torch.equal(matrix.dense(), here.matrices[name].dense())


def test_what_can_be_packed() -> None:
    for plan in (plan_of("llama"), plan_of("opt-post-norm", torch.bfloat16)):
        assert unreadable(plan) is None
    assert unreadable(plan_of("llama", torch.float32)) is not None
    odd = replace(CONFIGS["llama"], ffn_size=390)
    plan = replace(plan_of("llama"), ops=make_plan(odd, plan_of("llama").workload,
                   load_profile("gh200"), Policy()).ops)  # fmt: skip
    op = unreadable(plan)
    assert op is not None and op.shape[1] == 390


def test_capacities_are_what_the_plan_says() -> None:
    model = known_model("opt-350m")
    assert model is not None
    workload = Workload(batch_size=4, prompt_len=32, new_tokens=32, max_model_len=100)
    policy = Policy(offload_ratio=0.3, kv_offload_ratio=0.5)
    plan = make_plan(model, workload, load_profile("gh200"), policy)
    for is_packed in (False, True):
        sizes = tier_capacities(plan, packed=is_packed)
        for number, name in enumerate(plan.tiers):
            memory = plan.memory(number)
            planned = memory["weights"] + memory["kv"]
            assert planned <= sizes[name] < planned + 256 * 1000


def test_a_file_that_shrinks_while_it_is_read(directory: Path) -> None:
    save("llama", directory, torch.float16)
    plan = plan_of("llama")
    with Checkpoint(directory) as source:
        path = directory / "model-0.safetensors"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        with pytest.raises(CannotRun, match=r"model-0\.safetensors: too short"):
            packed("llama", plan, source)
        with pytest.raises(CannotRun, match="too short"):
            tiers = allocate_tiers(tier_capacities(plan, packed=False), CPU)
            load(source, plan, tiers, CPU)


def test_a_file_that_cannot_be_read(directory: Path) -> None:
    extent = streaming.Extent("gone", 10_000, 0, (4,), torch.float32)
    with pytest.raises(CannotRun, match=r"gone: cannot be read \(Bad file descriptor\)"):
        streaming.read(extent, torch.empty(4))


def test_streams_are_in_order_and_let_go_of_memory(directory: Path) -> None:
    values = torch.arange(100_000, dtype=torch.int32).view(torch.float32).view(1000, 100)
    save_file({"t": values}, directory / "model.safetensors")

    def requests() -> Iterator[list[tuple[Source, slice]]]:
        for start in range(0, 980, 30):
            source = Source("t", (1000, 100))
            yield [(source, slice(start, start + 20)), (source, slice(5, 6))]

    with Checkpoint(directory) as source:
        asked = list(requests())
        for request, tensors in zip(asked, source.stream(asked, CPU), strict=True):
            for (_, rows), (tensor,) in zip(request, tensors, strict=True):
                assert torch.equal(tensor.view(torch.int32), values[rows].view(torch.int32))
        stream = source.stream(asked, CPU)
        next(stream)
        stream.close()
        assert list(source.stream([], CPU)) == []


def test_dummy_weights_are_the_same_in_any_plan() -> None:
    everywhere = Policy(offload_ratio=0.7, remote=("host", "peer:1"))
    a = packed("opt-post-norm", plan_of("opt-post-norm"), Dummy())
    b = packed("opt-post-norm", plan_of("opt-post-norm", policy=everywhere), Dummy())
    plan = plan_of("opt-post-norm")
    tiers = allocate_tiers(tier_capacities(plan, packed=False), CPU)
    c = load(Dummy(), plan, tiers, CPU)
    for name, matrix in a.matrices.items():
        assert torch.equal(matrix.dense(), b.matrices[name].dense())
        assert torch.equal(matrix.dense(), c.matrices[name].dense())
    for name, vector in a.resident.items():
        assert torch.equal(vector, c.resident[name])
        if name != "positions":
            assert (vector == (0 if name.endswith("bias") else 1)).all()


def test_dummy_weights_are_normal() -> None:
    rows = torch.empty(400, 1000)
    Dummy().copy(Source("m.weight", (1000, 1000)), slice(100, 500), rows)
    assert rows.mean().abs() < 2e-4 and rows.std().item() == pytest.approx(0.02, rel=0.01)
    scaled = (rows / 0.02).flatten()
    assert scaled.pow(4).mean().item() == pytest.approx(3, rel=0.05)
    assert rows.isfinite().all() and len(rows.unique()) > 0.9 * rows.numel()
    correlation = torch.corrcoef(rows[:50])
    assert (correlation - torch.eye(50)).abs().max() < 0.2
    other = torch.empty(400, 1000)
    Dummy().copy(Source("n.weight", (1000, 1000)), slice(100, 500), other)
    assert torch.corrcoef(torch.stack([rows.flatten(), other.flatten()]))[0, 1].abs() < 0.01


@pytest.mark.parametrize("is_packed", [True, False])
def test_loading_is_short_calls_that_are_counted(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "COPY_ELEMENTS", 1000)
    plan, seen, sizes = plan_of("llama"), [], []

    class Noted(Dummy):
        def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
            sizes.append(out.numel())
            super().copy(source, rows, out)

    tiers = allocate_tiers(tier_capacities(plan, packed=is_packed), CPU)
    packing = Packing(tier_accesses(plan, CARD), CARD) if is_packed else None
    weights = load(
        Noted(), plan, tiers, CPU, packing=packing,
        on_load=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    total = sum(part.nbytes for matrix in weights.matrices.values() for part in matrix.parts)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {each for _, each in seen} == {total} and seen[-1][0] == total and len(seen) > 50
    assert max(sizes) <= max(1000, 392)


def test_an_interrupted_load_copies_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "COPY_ELEMENTS", 200)
    plan, interrupted, began = plan_of("llama"), threading.Event(), []

    class Slow(Dummy):
        def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
            if len(source.shape) > 1:  # a matrix: the first copy is done, the others wait
                began.append(rows)
                if len(began) > 1:
                    interrupted.wait(60)
                    time.sleep(0.02)

    def interrupt(done: int, total: int) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    tiers = allocate_tiers(tier_capacities(plan, packed=False), CPU)
    with pytest.raises(KeyboardInterrupt):
        load(Slow(), plan, tiers, CPU, on_load=interrupt)
    gate_ups = decoder_of(CONFIGS["llama"]).ops["gate_up"]
    assert len(began) < 500 < sum(one.shape[0] for one in gate_ups if isinstance(one, Matrix))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_packs_what_a_cpu_does(name: str, directory: Path) -> None:
    save(name, directory, torch.float16, torch.float32)
    device, plan = torch.device("cuda", torch.cuda.current_device()), plan_of(name, torch.bfloat16)
    for source in (Checkpoint(directory), Dummy()):
        here, there = packed(name, plan, source), packed(name, plan, source, device)
        for key, matrix in there.matrices.items():
            assert [part.arrays[0].is_cuda for part in matrix.parts] == [True, False]
            exact = here.matrices[key].dense()
            torch.testing.assert_close(matrix.dense(), exact, rtol=2**-7, atol=1e-5)
            if key not in folded(name) and isinstance(source, Checkpoint):
                assert torch.equal(matrix.dense(), exact)
        for key, vector in there.resident.items():
            torch.testing.assert_close(vector.cpu(), here.resident[key], rtol=2**-7, atol=1e-5)
