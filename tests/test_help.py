"""What --help and the README say: every default, the options of each mode, examples that run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dakrun.cli import main
from dakrun.cli.bench import OPTIONS_OF, bench
from dakrun.demo import MODEL, task

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(main.commands)
# These have no default: the option's absence means that nothing of the kind happens.
WITHOUT = {
    *("output", "input", "source", "model", "report_path", "plot", "budget", "nodes", "ray"),
    *("rival", "stop", "kernel", "vllm_python"),
}


def options(command: str) -> Iterator[tuple[click.Option, str]]:
    """The options of a command that take a value, and their help as it is shown."""
    found = main.commands[command]
    context = click.Context(found, info_name=command)
    for option in found.params:
        if isinstance(option, click.Option) and not option.is_flag and not option.hidden:
            record = option.get_help_record(context)
            assert record is not None
            yield option, " ".join(record[1].split())


def shown_default(option: click.Option) -> str | None:
    """The default of an option as click writes it; None if it has none."""
    value = option.get_default(click.Context(main), call=True)
    if value is None or value == () or "UNSET" in str(value):
        return None
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return str(value)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_default_is_shown(command: str) -> None:
    """In brackets or in words; an option without either is one of WITHOUT."""
    for option, text in options(command):
        default = shown_default(option)
        if default is not None:
            assert f"[default: {default}" in text, option.opts
        elif option.name not in WITHOUT and not option.required:
            assert re.search(r"\bdefault: \S", text, re.IGNORECASE), (option.opts, text)


def test_the_walk_sees_the_commands_and_their_defaults() -> None:
    assert {"generate", "plan", "bench", "evaluate", "profile", "convert"} <= set(COMMANDS)
    assert [option.name for option, _ in options("demo")] == ["threads"]
    defaults = {option.name: shown_default(option) for option, _ in options("bench")}
    assert defaults["rows"] == "1, 8, 16" and defaults["hbm_budget"] is None


def test_bench_says_what_each_mode_takes() -> None:
    """The options of a mode alone are those that bench refuses for the others."""
    flags = {option.name: option.opts[-1] for option in bench.params}
    parts = (bench.help or "").split("\n\n")
    of_all = {name for names in OPTIONS_OF.values() for name in names}
    titles = {"model": "--model alone", "gemm": "--kernel gemm", "attention": "--kernel attention"}
    for subject, title in titles.items():
        (part,) = [part for part in parts if part.strip().startswith(f"{title}:")]
        named = set(re.findall(r"--[a-z-]+", part.partition(":")[2]))
        assert named == {flags[name] for name in OPTIONS_OF[subject]}, subject
    (common,) = [part for part in parts if part.strip().startswith("All of them")]
    others = [option for option in bench.params if option.name not in {"kernel", *of_all}]
    expected = {option.opts[-1] for option in others}
    assert set(re.findall(r"--[a-z-]+", common)) == expected


def examples() -> list[str]:
    """The command lines of the README: of its table of commands, and of its blocks."""
    in_table = re.findall(r"^\|.*\| `(dakrun [^`]+)` \|$", README, re.MULTILINE)
    in_blocks = re.findall(r"^dakrun .+$", README, re.MULTILINE)
    return [*in_table, *in_blocks]


def test_the_examples_are_found() -> None:
    found = examples()
    assert len(found) >= 12
    assert {shlex.split(line)[1] for line in found} == set(COMMANDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with what the README's examples name."""
    (tmp_path / "DIR").symlink_to(MODEL)
    row = '{"prompt": "%s", "max_tokens": 2}\n'
    (tmp_path / "prompts.jsonl").write_text(row % task.prompt(3, 4), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", examples())
def test_an_example_of_the_readme_runs(line: str, folder: Path) -> None:
    """plan, validate and generate run; others take a GPU, a cluster or minutes, and are parsed."""
    _, command, *arguments = shlex.split(line, comments=True)
    if command == "plan" and "--plot" in arguments:
        pytest.importorskip("matplotlib")
    if command in ("plan", "validate") or (command == "generate" and "--ray" not in arguments):
        result = CliRunner().invoke(main, [command, *arguments])
        assert result.exit_code == 0, result.stderr
        assert command != "generate" or (folder / "out.jsonl").read_text().count("\n") == 1
        return
    found = main.commands[command]
    with found.make_context(command, arguments) as context:
        required = {option.name for option in found.params if option.required}
        assert all(context.params[name] is not None for name in required)


def test_torch_for_cpus_is_installed_as_the_package_needs_it() -> None:
    """From PyTorch's own index, the only one named, in a version that pyproject.toml allows."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (needed,) = re.findall(r'"(torch>[^"]+)"', pyproject)
    (line,) = [line for line in README.splitlines() if "--index-url" in line]
    command, then = line.partition("#")[0].split(" && ")
    assert shlex.split(command) == [
        *(".venv/bin/pip", "install", needed),
        *("--index-url", "https://download.pytorch.org/whl/cpu"),
    ]
    assert shlex.split(then) == [".venv/bin/pip", "install", "."]
