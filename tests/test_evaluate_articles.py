"""The figures of articles: batched products by the kernels, and a decode step by its parts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import atoms_map, boxes_map
from test_evaluate import rows, run, scope

from dakrun.engine import GraphRunner
from dakrun.kernels.experts import grouped_tiled
from dakrun.kernels.runtime import card_of
from dakrun.lab.evaluate import batches, steps
from dakrun.lab.evaluate.cases import STORED
from dakrun.lab.evaluate.figures import FIGURES
from dakrun.lab.evaluate.figures.articles import CUBLAS_US, HEADS, L2Barrier, Parts
from dakrun.lab.evaluate.points import PARTS, BatchPoint, PartPoint, Result
from dakrun.lab.evaluate.predict import predict
from dakrun.lab.evaluate.steps import Steps
from dakrun.models import known_model

QUERIES = BatchPoint(heads=128, rows=512, cols=128, n=1, bits=16, by="splitk")
PROFILE = "h200-pcie5"
PART = PartPoint(model="opt-6.7b", batch_size=4, prompt_len=8, new_tokens=4, part="attention")


# --- batched products


@pytest.mark.parametrize("by", ["splitk", "tiled"])
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("n", [1, 5])
def test_each_head_has_its_own_rows(
    by: Any, bits: Any, n: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the heads are those of several launches, and launched once more."""
    if kernel_device == "cpu":
        monkeypatch.setattr(grouped_tiled, "atoms_map", atoms_map)
        monkeypatch.setattr(grouped_tiled, "boxes_map", boxes_map)
    made, real = [], batches._matrices
    monkeypatch.setattr(batches, "_matrices", lambda *of: made.append(real(*of)) or made[-1])
    monkeypatch.setattr(batches, "MAX_EXPERTS", 2)
    point = BatchPoint(heads=5, rows=24, cols=128, n=n, bits=bits, by=by)
    x = torch.randn(5 * n, 128, dtype=torch.float16, device=kernel_device)
    out = torch.full((5 * n, 24), torch.nan, dtype=torch.float16, device=kernel_device)
    launch = batches.multiplied(point, x, out, card_of(torch.device(kernel_device)))
    assert len(made) == (3 if by == "splitk" else 1)
    for number in range(2):
        launch(number)
    dense = torch.cat([weight.dense() for weight in made]).view(5, 24, 128).double()
    exact = x.cpu().double().view(5, n, 128) @ dense.transpose(1, 2)
    assert 0.5 < exact.std() < 2, "outputs keep the scale of X"
    error = out.cpu().double().view_as(exact) - exact
    assert error.norm() < (1e-2 if bits == 4 else 1e-3) * exact.norm()


def test_cublas_multiplies_the_same_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    monkeypatch.setattr(
        torch, "bmm", lambda x, w, *, out: shapes.append((x.shape, w.shape, out.shape))
    )
    point = replace(QUERIES, heads=3, n=4, by="cublas")
    batches.launch_of(point, card_of, torch.device("cpu"))(0)  # type: ignore[arg-type]
    assert shapes == [((3, 4, 128), (3, 128, 512), (3, 4, 512))]


def test_all_kernels_are_compiled_ahead() -> None:
    """Those of every point of the figure."""
    from cards import H200

    from dakrun.kernels.experts import grouped_splitk
    from dakrun.launches import grouped_tiles

    found = list(batches._variants(H200))
    for point in (entry.point for entry in L2Barrier(scope(quick=False), {}).entries):
        assert isinstance(point, BatchPoint)
        stored = STORED[point.bits]
        if point.by == "splitk":
            sizes = {"experts": point.heads, "top_k": 1, "atom_bytes": stored.atom_bytes}
            tiles = grouped_tiles(point.heads * point.n, **sizes, spread=1)
            assert 8 * tiles >= min(point.n, 16)
            macros = grouped_splitk.defines(batches.DTYPE, tiles, "stored")
            assert (grouped_splitk.SOURCE, {**macros, **stored.macros}) in found
    assert len({source for source, _ in found}) == 2 and len(found) == 4 + 2 + 1 + 1


def test_points_of_the_sweep() -> None:
    """8 to 128 MiB by heads, batches of 1 to 64, both shapes, in both numbers of bits."""
    figure = L2Barrier(scope(quick=False), {})
    points = [entry.point for entry in figure.entries]
    assert {(of.rows, of.cols) for of in points} == {(512, 128), (128, 512)}
    assert {of.n for of in points} == {1, 4, 16, 64} and {of.heads for of in points} == {*HEADS}
    assert {(of.by, of.bits) for of in points} == {
        *((by, bits) for by in ("splitk", "tiled") for bits in (4, 16)), ("cublas", 16),
    }  # fmt: skip
    assert {entry.x for entry in figure.entries} == {8, 16, 32, 48, 64, 128}
    assert {x for x, _ in CUBLAS_US} <= {entry.x for entry in figure.entries}


def test_only_what_the_planner_knows_is_predicted() -> None:
    figure = L2Barrier(scope(predict=True, quick=False), {})
    assert {entry.series for entry in figure.entries} == {"4 bits", "16 bits"}
    assert not any(predict(entry.point, figure.scope).problem for entry in figure.entries)


def test_finding_of_the_sweep() -> None:
    figure = L2Barrier(scope(), {})
    for entry in figure.entries:
        slower = 2.0 if entry.series.startswith("cuBLAS") else 1.0
        slower *= 1 + (entry.x == 16) * entry.series.startswith("4 bits")  # the same time there
        figure.results[entry.point.key] = Result(source="measured", seconds=1e-6 * slower)
    assert list(figure.here()) == ["1.00 x (queries, batch 1)", "1.00 x (queries, batch 64)"]
    first, _ = figure.sentences()
    assert first == (
        "queries, batch 1: 4 bits are 1.00 x (at 16 MiB) to 2.00 x (at 48 MiB) as fast as cuBLAS "
        "in 16 bits."
    )


def test_a_batch_is_predicted_by_what_holds_it() -> None:
    """In L2 with few bits, in HBM with many; cuBLAS is not predicted."""
    here = scope("h200-pcie5")
    machine = here.profile
    assert machine.l2 is not None
    large = replace(QUERIES, heads=1024)
    for point, rate in ((QUERIES, machine.l2[1]), (large, machine.hbm_bytes_per_s)):
        found = predict(point, here)
        fixed, efficiency = machine.linear.at(1)
        nbytes = 2 * point.heads * 512 * 128
        assert found.weight_bytes == nbytes and found.predicted_s is None
        assert found.seconds == pytest.approx(nbytes / rate / efficiency + fixed)
    few = predict(replace(large, bits=4), here)
    assert few.weight_bytes == 1024 * 512 * 128 * (1 / 2 + 2 / 128)
    assert predict(replace(QUERIES, by="cublas"), here).problem == "not predicted"


# --- parts of a step


def test_parts_of_a_plan() -> None:
    here = scope()
    found = {part: predict(replace(PART, part=part), here) for part in PARTS}
    plan = here.roomy().plan(here.step("opt-6.7b", 4, 0.0, prompt_len=8, new_tokens=4))
    times = [of.seconds for of in found.values() if of.seconds]
    assert len(times) == 3 and sum(times) == pytest.approx(plan.predicted_s)
    linear = sum(sum(op.predicted_s) for op in plan.ops if op.op.category == "linear")
    assert found["linear layers"].seconds == pytest.approx(linear)
    assert found["RoPE"].problem == "predicted as a part of its op"


class FakeRunner(GraphRunner):
    """Times of ops, in which the fused parts take 2 ms, 1 ms and 0.5 ms."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str | None]] = []

    def op_seconds(self, length: int, leave_out: str | None = None) -> dict[str, float]:  # type: ignore[override]
        self.asked.append((length, leave_out))
        whole = {"qkv": 10e-3, "up": 20e-3, "attention": 5e-3, "embedding": 1e-3, "sampling": 1e-3}
        parts = {
            "norms": {"qkv": 9e-3, "up": 19e-3}, "activation": {"up": 19e-3},
            "rope": {"attention": 4.5e-3},
        }  # fmt: skip
        return parts[leave_out] if leave_out else whole


def test_parts_are_differences_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them from one model, each with less the others."""
    runner, loaded = FakeRunner(), []

    class FakeLLM:
        def __init__(self, name: str, **options: Any) -> None:
            loaded.append(options)
            stats = SimpleNamespace(step_s=[39e-3, 40e-3, 41e-3])
            self.engine = SimpleNamespace(runner=runner, stats=stats)
            categories = {"qkv": "linear", "up": "linear", "attention": "attention",
                          "embedding": "gather"}  # fmt: skip
            ops = [SimpleNamespace(name=name, category=of) for name, of in categories.items()]
            self.plan = SimpleNamespace(ops=[SimpleNamespace(op=op) for op in ops])

        def __enter__(self) -> "FakeLLM":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(steps, "LLM", FakeLLM)
    monkeypatch.setattr(steps, "finish", lambda llm, asked: len(list(asked)))
    here = scope()
    measured = Steps(here, torch.device("cuda"), None, {"opt-6.7b": "opt-6.7b"})  # type: ignore[arg-type]
    found = {part: measured.part(replace(PART, part=part)).seconds for part in PARTS}
    assert found == pytest.approx({
        "linear layers": 27e-3, "attention": 4.5e-3, "norms": 2e-3, "activation": 1e-3,
        "RoPE": 0.5e-3, "other": 5e-3,
    })  # fmt: skip
    assert len(loaded) == 1 and loaded[0]["batch_size"] == 4 and loaded[0]["max_model_len"] == 12
    assert runner.asked == [(10, part) for part in (None, "norms", "activation", "rope")]
    assert measured.part(replace(PART, part="other", batch_size=2)).seconds and len(loaded) == 2


def test_the_articles_shares_are_beside() -> None:
    model = known_model("qwen2.5-7b")
    assert model is not None
    figure = Parts(scope(models={"qwen2.5-7b": model}), {})
    for entry in figure.entries:
        figure.results[entry.point.key] = Result(source="measured", seconds=1e-3 * (entry.x + 1))
    head, *rows = figure.table()
    assert head[2:] == ["us", "%", "article (us)", "article (%)"]
    assert [row[1] for row in rows] == list(PARTS)
    assert [row[5] for row in rows] == ["70.6%", "19.6%", "2.0%", "1.4%", "0.8%", "5.5%"]
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.3)
    (line,) = [of for of in figure.panels()[0].series if of.kind == "line"]
    assert line.name.startswith("article")


def test_articles_on_the_page(tmp_path: Path) -> None:
    args = ("--predict", "--profile", "h100-pcie5", "--quick", "--only", "l2,parts")
    ended = run(*args, "--model", "qwen2.5-7b", "-o", tmp_path)
    assert ended.exit_code == 0, ended.stderr
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    for name in ("l2", "parts"):
        assert f'id="{name}"' in text and FIGURES[name].title in text
    assert "article, cuBLAS on an H100" in text and "linear layers 70.6%" in text


# --- on a GPU


@pytest.mark.alone
@pytest.mark.gpu
def test_batches_on_a_gpu(tmp_path: Path) -> None:
    """Every point of the quick sweep has a time."""
    ended = run("--quick", "--only", "l2", "--profile", PROFILE, "-o", tmp_path)
    assert ended.exit_code == 0, ended.stderr
    found = rows(tmp_path, "l2")
    assert len(found) > 10 and all(row["seconds"] and not row["problem"] for row in found)


@pytest.mark.alone
@pytest.mark.gpu
def test_parts_on_a_gpu(tmp_path: Path) -> None:
    """Every part of the step has a time."""
    only = ("--quick", "--only", "parts", "--model", "qwen2.5-0.5b")
    ended = run(*only, "--profile", PROFILE, "-o", tmp_path)
    assert ended.exit_code == 0, ended.stderr
    found = rows(tmp_path, "parts")
    assert len(found) == len(PARTS)
    assert all(row["seconds"] and not row["problem"] for row in found)
    assert "linear layers" in (tmp_path / "index.html").read_text(encoding="utf-8")
