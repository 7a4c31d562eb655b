"""The Python API as README.md shows it: names of the package, imported late, and results."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import tiny_models
from tiny_tokenizer import make_tokenizer_files

import dakrun
from dakrun import LLM, Completion, SamplingParams

ROOT = Path(__file__).resolve().parent.parent


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = loaded_by("import dakrun")
    assert {name for name in loaded if name.startswith(("dakrun", "torch"))} == {"dakrun"}


def test_params_and_policies_need_no_torch() -> None:
    loaded = loaded_by("from dakrun import Policy, SamplingParams")
    assert "dakrun.config" in loaded and "torch" not in loaded


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate --model none -i a.jsonl -o b.jsonl", "'none': no such model directory"),
        ("generate --model opt-125m -i a.jsonl -o b.jsonl", "names an architecture, not a"),
        ("generate --model nix --load-format dummy -i a.jsonl -o b.jsonl", "'nix': no such model"),
        ("convert none .", "error: none: no such file or folder"),
    ],
)
def test_a_name_of_nothing_is_refused_before_torch_is_imported(arguments: str, said: str) -> None:
    code = f"""
import io, contextlib
from dakrun.cli import main
said = io.StringIO()
with contextlib.redirect_stderr(said):
    with contextlib.suppress(SystemExit):
        main({arguments.split()!r})
assert {said!r} in said.getvalue(), said.getvalue()
"""
    assert "torch" not in loaded_by(code)


def test_names_of_the_package() -> None:
    for name in dakrun.__all__:
        assert getattr(dakrun, name) is not None and name in dir(dakrun)
    assert dakrun.LLM.__module__ == "dakrun.llm"
    with pytest.raises(AttributeError, match="module 'dakrun' has no attribute 'LLMs'"):
        dakrun.LLMs  # type: ignore[attr-defined] # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    source = ast.parse((ROOT / "dakrun" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [
        node.body
        for node in source.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: node.module
        for node in block
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name, module in seen.items():
        assert getattr(dakrun, name) is getattr(import_module(module), name)
    assert {*seen, "__version__"} == set(dakrun.__all__)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random OPT with a tokenizer."""
    directory = make_tokenizer_files(tmp_path_factory.mktemp("model"))
    return tiny_models.save("opt-like-125m", directory)


def test_the_example_in_the_readme(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs as it is in a checkout, and prints what its comments say."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (example,) = (text for text in examples if "LLM(" in text)
    said = re.findall(r"^# (.*)$", example, re.MULTILINE)
    assert len(said) == 2
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == said
    completions, report = names["completions"], names["report"]
    assert isinstance(completions, list) and isinstance(report, dict)
    for number, completion in enumerate(completions):
        assert isinstance(completion, Completion) and completion.id == str(number)
        assert completion.ttft_s > 0 and completion.tpot_s > 0
    assert {"tokens_per_s", "decode_step_s", "eb_bytes_per_s"} <= report.keys()
    held = {tier["name"]: tier["weights_bytes"] for tier in report["tiers"]}
    assert held["hbm"] > held["host"] > 0


def test_params_for_each_prompt_and_token_ids(model: Path) -> None:
    llm = LLM(model, device="cpu", batch_size=2)
    assert llm.report()["tokens_per_s"] is None
    lengths = [1, 5, 3]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    completions = llm.generate(["one", [5, 6, 7], "three"], params)
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert [completion.id for completion in completions] == ["0", "1", "2"]
    report = llm.report()
    assert report["requests"]["new_tokens"] == sum(lengths)
    busy = report["time"]["prefill_s"] + report["time"]["decode_s"]
    assert report["time"]["wall_s"] == pytest.approx(busy)
    assert report["tokens_per_s"] == pytest.approx(sum(lengths) / busy)
