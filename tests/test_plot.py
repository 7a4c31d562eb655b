"""The picture of a plan: its data, a PNG of the right size, and the error without matplotlib."""

import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.config import Workload
from dakrun.errors import CannotRun
from dakrun.hardware import load_profile
from dakrun.models import known_model
from dakrun.plan import Plan, Policy, make_plan
from dakrun.plan.show.overview import Overview
from dakrun.plan.show.plot import RooflinePoint, clusters, plot_plan, points, ratio_curve
from dakrun.plan.show.table import summary_rows
from dakrun.units import format_rate


def a_plan(batch_size: int = 8, *, profile: str = "gh200", **fixed: object) -> Plan:
    workload = Workload(batch_size=batch_size, prompt_len=32, new_tokens=32, max_model_len=64)
    policy = Policy(**fixed)  # type: ignore[arg-type]
    return make_plan(known_model("opt-6.7b"), workload, load_profile(profile), policy)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels from a PNG's header."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR"
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize(
    "plan",
    [
        a_plan(),
        a_plan(512, strategy="uniform"),
        a_plan(profile="cpu"),
        a_plan(64, hbm_budget=4 << 30, remote=("host", "peer:1"), profile="h200-nvlink-peer"),
    ],
)
def test_a_png(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.png"
    plot_plan(plan, path, steps=4)
    assert png_size(path) == (1950, 840)


def test_points() -> None:
    plan = a_plan()
    found = {point.name: point for point in points(plan)}
    assert list(found) == ["qkv", "attention", "o", "fc1", "fc2", "lm_head"]
    total_rate = 4.45e12
    for point in found.values():
        assert 0 < point.flops_per_s <= 1.01 * point.intensity * total_rate
    assert found["fc1"].ratio == plan.op("fc1").ratio


def test_clusters() -> None:
    def point(name: str, intensity: float, rate: float) -> RooflinePoint:
        return RooflinePoint(name, "linear", intensity, rate, 0.1)

    groups = clusters([point("a", 8, 1e12), point("b", 1, 1e11), point("c", 8.1, 1.1e12)])
    assert [[p.name for p in group] for group in groups] == [["b"], ["a", "c"]]


def test_the_curve_skips_what_does_not_fit() -> None:
    plan = a_plan(hbm_budget=8 << 30)
    curve = ratio_curve(plan, "greedy", 10)
    shares = [share for share, _, _ in curve]
    assert shares == sorted(shares) and 0 < len(shares) < 11
    assert shares[0] >= plan.required_ratio and shares[-1] == pytest.approx(1.0)
    assert all(bound >= predicted > 0 for _, bound, predicted in curve)
    best = plan.weight_bytes / plan.predicted_s
    assert max(predicted for _, _, predicted in curve) <= 1.001 * best


def run(*args: str) -> Result:
    command = ["plan", "--model", "opt-125m", "--profile", "gh200", "--batch-size", "8"]
    return CliRunner(env={"DAKRUN_DEBUG": ""}).invoke(main, [*command, *args])


def test_the_option(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    result = run("--plot", str(path))
    assert result.exit_code == 0, result.stderr
    assert "ecode step" in result.stdout
    assert png_size(path)[0] == 1950


def test_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CannotRun, match="needs matplotlib") as caught:
        plot_plan(a_plan(), tmp_path / "plan.png")
    assert caught.value.hint == "pip install 'dakrun[plot]'"
    assert run("--plot", str(tmp_path / "plan.png")).exit_code == 3


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "folder.png", tmp_path):
        result = run("--plot", str(path))
        assert result.exit_code == 2 and result.stdout == ""
        assert result.stderr.startswith(f"error: {path}: ") and "hint: " in result.stderr


@pytest.mark.parametrize("strategy", ["auto", "greedy", "uniform"])
def test_the_picture_has_the_ebs_of_the_table(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The star's label is the table's EB, and the uniform curve goes through the uniform plan's."""
    plan = a_plan(512, hbm_budget=30 << 30, strategy=strategy)
    figures: list[Any] = []
    monkeypatch.setattr("dakrun.plan.show.picture.save", lambda figure, _: figures.append(figure))
    plot_plan(plan, tmp_path / "plan.png", steps=4)
    lines = {line.get_label(): line for line in figures[0].axes[1].lines}
    rows = dict(summary_rows(Overview.of(plan)))
    (star,) = (label for label in lines if label.startswith("chosen"))
    (eb,) = re.findall(r"EB [\d,.]+ GB/s", star)
    assert f", {eb}," in rows["predicted"]
    uniform = a_plan(512, hbm_budget=30 << 30, strategy="uniform")
    speed = uniform.weight_bytes / uniform.predicted_s
    assert f"EB {format_rate(speed)}" in rows["uniform pred."]
    drawn = ratio_curve(plan, "uniform", 50)
    nearest = min(drawn, key=lambda point: abs(point[0] - uniform.ratio))
    assert nearest[2] == pytest.approx(speed, rel=0.02)
    curve = lines[f"{plan.strategy}, predicted"].get_xydata().tolist()
    chosen = [100 * plan.ratio, plan.weight_bytes / plan.predicted_s / 1e9]
    assert any(point == pytest.approx(chosen) for point in curve)
