"""generation_config.json: said, taken on request, never silently applied; greedy is the default."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.demo import MODEL

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "model")
    Path("p.txt").write_text("12+34=\n")
    return tmp_path


def suggest(folder: str, **keys: Any) -> None:
    Path(folder).mkdir(exist_ok=True)
    path = Path(folder) / "generation_config.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | keys))


def run(*flags: str) -> Result:
    given = ["generate", "--model", "model", "-i", "p.txt", "-o", "o.jsonl", "--device", "cpu"]
    return CliRunner().invoke(main, [*given, "--overwrite", "--max-tokens", "3", *flags])


def sampling() -> dict[str, Any]:
    """The sampling parameters that the run kept in its fingerprint."""
    kept: dict[str, Any] = json.loads(Path("o.jsonl.run.json").read_text())["sampling"]
    return kept


def test_a_greedy_run_says_what_the_model_suggests(folder: Path) -> None:
    suggest("model", **SAMPLED)
    result = run()
    said = [line for line in result.stderr.splitlines() if "generation_config" in line]
    assert result.exit_code == 0 and said == [
        "greedy; the model's generation_config.json suggests temperature 0.7, top_p 0.9, which "
        "--generation-config auto takes"
    ]
    assert sampling()["temperature"] == 0 and sampling()["top_p"] == 1
    assert "generation_config" not in run("--temperature", "0.5").stderr
    suggest("model", do_sample=False)
    assert "generation_config" not in run().stderr
    suggest("model", num_beams=4)
    assert "suggests num_beams 4, of which num_beams is not supported" in run().stderr


def test_auto_and_a_folder_take_it_and_given_options_come_first(folder: Path) -> None:
    suggest("model", **SAMPLED)
    suggest("other", do_sample=True, top_k=7)
    suggest("penalty", repetition_penalty=1.1, min_p=0.0)
    for flags, wanted in (
        (("auto",), (0.7, 0, 0.9)),
        (("auto", "--top-p", "0.5"), (0.7, 0, 0.5)),
        (("auto", "--temperature", "0"), (0.0, 0, 0.9)),
        (("other",), (1.0, 7, 1.0)),
        (("none",), (0.0, 0, 1.0)),
    ):
        result = run("--generation-config", *flags)
        assert result.exit_code == 0, result.output
        found = sampling()
        assert (found["temperature"], found["top_k"], found["top_p"]) == wanted
        assert found["max_tokens"] == 3 and "min_p" not in found
    assert run("--generation-config", "penalty").exit_code == 0
    assert (sampling()["temperature"], sampling()["repetition_penalty"]) == (0, 1.1)


def test_what_cannot_be_taken_is_refused(folder: Path) -> None:
    suggest("beams", do_sample=True, num_beams=4)
    suggest("hot", do_sample=True, temperature="high")
    suggest("stops", stop_strings=["="])
    suggest("guided", guidance_scale=1.5)
    suggest("biased", sequence_bias=[[[5], 9.0]])
    for place, code, said in (
        ("beams", 3, "asks for num_beams 4, which is not supported"),
        ("stops", 3, "asks for stop_strings ['='], which is not supported"),
        ("guided", 3, "asks for guidance_scale 1.5, which is not supported"),
        ("biased", 3, "asks for sequence_bias [[[5], 9.0]], which is not supported"),
        ("hot", 2, "generation_config.json: temperature is 'high'"),
        ("missing", 2, "generation_config.json: no such file"),
    ):
        result = run("--generation-config", place)
        assert (result.exit_code, said in result.stderr) == (code, True), result.output
        assert not Path("o.jsonl").exists()
