"""The tool that measures drafts: the same requests in every run, lines with the right figures."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tools import draft_speed

from dakrun.demo import MODEL

TOOL = Path(draft_speed.__file__)
CONFIG = {"max_position_embeddings": 4096, "vocab_size": 1000}


@pytest.mark.parametrize("file", list(draft_speed.ROWS))
def test_requests_differ_and_are_the_same_again(file: str) -> None:
    rows = list(draft_speed.requests(file, CONFIG))
    assert rows == list(draft_speed.requests(file, CONFIG))
    assert len(rows) == draft_speed.ROWS[file]
    prompts = {json.dumps(row.get("messages") or row["prompt_token_ids"]) for row in rows}
    assert len(prompts) == len({row["id"] for row in rows}) == len(rows)


def test_answers_that_copy_have_begun_as_the_text_does() -> None:
    """A third of each kind; all but the changed word of what has begun is in the task."""
    kinds = Counter[str]()
    for row in draft_speed.requests("copy", CONFIG):
        task, begun = (message["content"] for message in row["messages"])
        kinds[task.split()[0]] += 1
        said = begun.split("\n\n")[1].replace("- ", "").removesuffix("-").splitlines()
        missing = set(" ".join(said).split()) - set(task.replace(";", " ").split())
        assert len(missing) <= 2, missing
    assert sorted(kinds.values()) == [85, 85, 86]


def test_a_line_has_medians_and_the_drafts_of_the_last_run() -> None:
    drafts = {"tokens_per_step_and_row": 3.2, "accepted_tokens": 30, "drafted_tokens": 40}

    def report(rate: float, drafts: object = None) -> dict[str, object]:
        time = {
            "wall_s": 100 / rate, "predicted_s": 9.5, "decode_s": 70 / rate,
            "decode_steps": int(20_000 / rate), "prefill_s": 20 / rate, "prefill_steps": 12,
        }  # fmt: skip
        return {"tokens_per_s": rate, "time": time, "drafts": drafts}

    off, on = [report(10), report(12.5), report(20)], [report(25), report(50), report(20, drafts)]
    assert draft_speed.line("copy", ("off", "auto"), (off, on), (7, 8)) == (
        "copy, auto: 2.000 x off; 12.5 and 25.0 tokens/s; medians of 3 runs (2.500, 4.000, 1.000); "
        "3.20 tokens a row and step; 75.0% of 40 drafts accepted; 8.0 and 4.0 s; "
        "steps 3.50 s for 1,000 + 1.00 s for 12 with prompts and "
        "3.50 s for 1,000 + 1.00 s for 12 with prompts; "
        "predicted without drafts 9.5 s; 7 of 8 answers equal"
    )


def measure(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--model", str(MODEL), "--files", "random", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.full
def test_a_file_without_drafts_and_with(tmp_path: Path) -> None:
    found = measure(
        *("--rows", "3", "--batch-size", "2", "--folder", str(tmp_path)),
        *("--", "--device", "cpu", "--dtype", "float32"),
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("random, suffix: ") and found.stdout.count("\n") == 1
    assert "3 of 3 answers equal" in found.stdout
    reports = [json.loads((tmp_path / f"random-{mode}.report.json").read_text())
               for mode in ("off", "suffix")]  # fmt: skip
    assert [report["requests"]["finished"] for report in reports] == [3, 3]
    assert reports[0]["drafts"] is None


def test_a_run_that_fails_says_why() -> None:
    found = measure("--modes", "off", "--", "--device", "cpu", "--threads", "0")
    assert found.returncode == 1 and "random-off: exit code 2" in found.stderr
    assert "--threads" in found.stderr
