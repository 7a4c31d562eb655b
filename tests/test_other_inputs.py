"""Tables and JSON arrays as prompt files: refused, with a command that makes rows of them."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.errors import UsageError
from dakrun.requests import RequestReader

ARRAY = '[{"prompt": "one"}, {"prompt": "two"}]'


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a.csv", "pandas.read_csv("),
        ("a.csv.gz", "pandas.read_csv("),
        ("a.json", "jq -c '.[]'"),
    ],
)
def test_a_table_is_to_be_converted(name: str, command: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("prompt\none\n")
    with pytest.raises(UsageError, match="prompt files end in") as caught:
        RequestReader(tmp_path / name, defaults=SamplingParams())
    assert command in caught.value.hint and "one JSON object a line" in caught.value.hint


@pytest.mark.parametrize("name", ["rows.jsonl", "rows"])
@pytest.mark.parametrize("text", [ARRAY, ARRAY.replace("[", "[\n").replace(", {", ",\n{")])
def test_an_array_is_refused_before_the_model_loads(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("dakrun.llm.LLM.__init__", no_model)
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    model = str(MODEL)
    result = CliRunner().invoke(main, ["generate", "--model", model, "-i", name, "-o", "out.jsonl"])
    assert result.exit_code == 2, result.output
    assert f"{name}: a JSON array, not one JSON object a line" in result.stderr
    assert "jq -c '.[]'" in result.stderr and not Path("out.jsonl").exists()


@pytest.mark.parametrize(("name", "text"), [("p", "[INST] one [/INST]\n"), ("p.txt", ARRAY + "\n")])
def test_text_may_begin_with_a_bracket(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with RequestReader(tmp_path / name, defaults=SamplingParams()) as reader:
        assert reader.row_format() == "native" and reader.needs_tokenizer()
