"""A run over several machines foretold: parts by speed, all rows once, machines that cannot."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dakrun.cli.main import main
from dakrun.errors import UsageError
from dakrun.plan import ExpectedRun
from dakrun.plan.nodes import NodeCount, parse_nodes
from dakrun.requests import RowLengths


def file_of(count: int, folder: Path) -> Path:
    """A prompt file of `count` rows."""
    path = folder / "prompts.jsonl"
    rows = (
        {"prompt_token_ids": [5] * (20 + i % 400), "max_tokens": 50 + i % 100} for i in range(count)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return file_of(400, tmp_path)


def foretold(prompts: Path, nodes: str, *options: str) -> dict[str, object]:
    command = ["plan", "--model", "llama-3-8b", "-i", str(prompts), "--nodes", nodes, "--json"]
    result = CliRunner().invoke(main, [*command, *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_nodes_are_profiles_and_counts() -> None:
    assert parse_nodes("a:4, b/c.toml") == [NodeCount("a", 4), NodeCount("b/c.toml", 1)]
    for bad in ("a:0", "a:x", "", "a:4,", ":3", "a:99999999"):
        with pytest.raises(UsageError) as found:
            parse_nodes(bad)
        assert "profiles and how many" in found.value.hint


@pytest.mark.parametrize("part", [0.001, 0.1, 0.37, 1.0])
def test_a_part_is_spread_over_all_lengths(part: float) -> None:
    rows = [RowLengths(10, new) for new in range(1, 1001)]
    taken = ExpectedRun(rows).part(part).rows
    assert len(taken) == round(part * len(rows)) == len(set(taken))
    assert abs(sum(row.new for row in taken) / len(taken) - 500) < 12


def test_a_part_has_rows_that_can_be_run() -> None:
    run = ExpectedRun([RowLengths(10, 7), *[RowLengths(0, 0, 0)] * 9])
    assert run.part(0.5).rows == [RowLengths(10, 7)] and ExpectedRun([]).part(0.5).rows == []
    assert len(ExpectedRun([RowLengths(10, 7)] * 5).part(1 / 2).rows) == 3


def test_machines_of_a_kind_share_the_run(prompts: Path) -> None:
    one, four = (foretold(prompts, f"h200-pcie5:{count}") for count in (1, 4))
    assert one["nodes"][0]["rows_each"] == 400 and four["nodes"][0]["rows_each"] == 100
    assert one["new_tokens"] == four["new_tokens"] == sum(50 + i % 100 for i in range(400))
    assert one["seconds"] / 4 < four["seconds"] < one["seconds"]


def test_each_kind_has_rows_by_its_speed(tmp_path: Path) -> None:
    prompts = file_of(2000, tmp_path)  # far more than decode together on a machine
    found = foretold(prompts, "h200-pcie5:1,rtx-pro-6000:2")
    fast, slow = found["nodes"]
    assert fast["rows_each"] + 2 * slow["rows_each"] == pytest.approx(2000, abs=3)
    assert fast["rows_each"] > 1.5 * slow["rows_each"] > 0
    assert fast["seconds"] == pytest.approx(slow["seconds"], rel=0.2)
    assert found["seconds"] < 0.75 * foretold(prompts, "h200-pcie5:1")["seconds"]


def test_machines_without_room_are_left_out(prompts: Path) -> None:
    command = ["plan", "--model", "llama-2-70b", "-i", str(prompts), "--host-budget", "20GiB"]
    result = CliRunner().invoke(main, [*command, "--nodes", "h200-pcie5:1,rtx-pro-6000:2"])
    assert result.exit_code == 0, result.output
    assert "rtx-pro-6000 is left out: " in result.stderr
    assert "on 1 machine," in result.stdout and "rtx" not in result.stdout
    assert " 400 " in result.stdout and "without drafts" not in result.stdout
    drafted = [*command, "--nodes", "h200-pcie5:1", "--speculate", "auto"]
    assert "the time is that of a run without drafts" in CliRunner().invoke(main, drafted).stdout
    result = CliRunner().invoke(main, [*command, "--nodes", "rtx-pro-6000:2"])
    assert result.exit_code == 3 and "hint: " in result.stderr


def test_there_may_be_fewer_rows_than_machines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt":"one","max_tokens":9}\n' * 3, encoding="utf-8")
    found = foretold(path, "h200-pcie5:4")
    assert found["nodes"][0]["rows_each"] == 1 and found["seconds"] > 0
    assert found["new_tokens"] == 27, "each row's once"


def test_it_needs_a_file() -> None:
    result = CliRunner().invoke(main, ["plan", "--model", "opt-30b", "--nodes", "h200-pcie5:2"])
    assert result.exit_code == 2 and "hint: give -i" in result.stderr
