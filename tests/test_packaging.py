"""Wheel and sdist hold what a run needs; READMEs and the layout of dakrun/ follow the rules."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dakrun
from dakrun.resources import resource_dir

ROOT = Path(__file__).resolve().parent.parent
MODEL = "dakrun/demo/model/model.safetensors"
MAX_README_LINES = 219
MAX_TOP_MODULES = 12


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built by calling the backend: no network."""
    out = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_python(code: str, *, pythonpath: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that sees the packages in `pythonpath` and no others."""
    env = {**os.environ, "PYTHONPATH": str(pythonpath)}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def data_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("name", ["native", "profiles"])
def test_wheel_has_the_resources(wheel: Path, name: str) -> None:
    files = data_files(ROOT / name)
    assert files
    with zipfile.ZipFile(wheel) as archive:
        for path in files:
            packed = f"dakrun/_resources/{path.relative_to(ROOT).as_posix()}"
            assert archive.read(packed) == path.read_bytes()


def test_wheel_has_profiles_demo_model_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(f"dakrun-{dakrun.__version__}.dist-info/entry_points.txt")
        metadata = archive.read(f"dakrun-{dakrun.__version__}.dist-info/METADATA").decode()
    assert any(name.startswith("dakrun/_resources/profiles/") for name in names)
    assert {MODEL, "dakrun/py.typed"} <= set(names)
    assert metadata.endswith((ROOT / "README.md").read_text(encoding="utf-8"))
    assert b"dakrun = dakrun.cli.main:main" in entry_points


def test_wheel_has_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert tops == {"dakrun", f"dakrun-{dakrun.__version__}.dist-info"}


def test_sdist_has_the_sources(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {MODEL, "dakrun/resources.py", "pyproject.toml"} <= names
    for folder in ("native", "profiles"):
        assert {p.relative_to(ROOT).as_posix() for p in data_files(ROOT / folder)} <= names


def test_resource_dir_in_a_checkout() -> None:
    assert resource_dir("native") == ROOT / "native"
    assert resource_dir("profiles") == ROOT / "profiles"


@pytest.mark.parametrize("name", ["native", "profiles"])
def test_resource_dir_in_an_installed_wheel(unpacked: Path, tmp_path: Path, name: str) -> None:
    code = f"from dakrun.resources import resource_dir; print(resource_dir({name!r}))"
    run = run_python(code, pythonpath=unpacked, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = Path(run.stdout.strip())
    assert found == unpacked / "dakrun" / "_resources" / name
    assert [p.relative_to(found) for p in data_files(found)] == [
        p.relative_to(ROOT / name) for p in data_files(ROOT / name)
    ]


def test_resource_dir_says_what_is_missing(tmp_path: Path) -> None:
    package = tmp_path / "dakrun"
    package.mkdir()
    for name in ("__init__.py", "errors.py", "resources.py"):
        (package / name).write_bytes((ROOT / "dakrun" / name).read_bytes())
    code = "from dakrun.resources import resource_dir; resource_dir('native')"
    run = run_python(code, pythonpath=tmp_path, cwd=tmp_path)
    assert run.returncode == 1
    assert "CannotRun: dakrun's folder 'native' is missing" in run.stderr


def folder_map(readme: str) -> list[str]:
    """The paths in the folder map of `readme`, such as "dakrun/" and "dakrun/plan/"."""
    block = re.search(r"^## Where things are\n+```\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert block, "README.md has no folder map under 'Where things are'"
    paths: list[str] = []
    above: list[str] = []
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], line.split()[0]]
        paths.append("".join(above))
    return paths


def map_errors(named: list[str], folders: set[str]) -> list[str]:
    """The differences between the folders `named` in README's map and the existing `folders`."""
    return [
        *(f"{path}: is in README.md's map twice" for path in set(named) if named.count(path) > 1),
        *(f"{path}: is in README.md's map, but does not exist" for path in set(named) - folders),
        *(f"{path}: add a line for it to the map in README.md" for path in folders - set(named)),
    ]


def links(markdown: str) -> list[str]:
    """The targets of the links of `markdown` that are relative paths, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", markdown)
    relative = (t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:", t))
    return [target for target in relative if target]


def git_files() -> set[str]:
    """Files that git tracks, or would add, and that exist."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("needs a git checkout to tell the project's files from others")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(listed.stderr)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def python_folders() -> list[str]:
    """The folders of dakrun/, at any depth, that hold Python files."""
    return sorted({str(Path(f).parent) for f in git_files() if re.match(r"dakrun/.*\.py$", f)})


def test_the_readmes_map_names_every_folder() -> None:
    parts = [Path(file).parts for file in git_files()]
    folders = {"dakrun/", "native/", "profiles/", "tests/"}
    folders |= {f"dakrun/{part[1]}/" for part in parts if part[0] == "dakrun" and len(part) > 2}
    named = folder_map((ROOT / "README.md").read_text(encoding="utf-8"))
    errors = map_errors(named, folders)
    assert not errors, "\n" + "\n".join(errors)


def test_errors_of_a_map_are_found() -> None:
    lines = ("dakrun/", "  cli/   a", "  gone/  b c", "  cli/   d", "native/  e")
    named = folder_map("\n".join(("## Where things are", "", "```", *lines, "```", "")))
    assert named == ["dakrun/", "dakrun/cli/", "dakrun/gone/", "dakrun/cli/", "native/"]
    errors = map_errors(named, {"dakrun/", "dakrun/cli/", "dakrun/plan/", "native/"})
    assert [error.partition(":")[0] for error in errors] == [
        *("dakrun/cli/", "dakrun/gone/", "dakrun/plan/"),
    ]


def test_the_readme_is_short() -> None:
    count = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    assert count <= MAX_README_LINES, "README.md is too long; move details to the folders' READMEs"


def test_links_of_markdown_files_lead_to_files() -> None:
    files = [ROOT / name for name in git_files() if name.endswith(".md")]
    assert ROOT / "README.md" in files
    broken = [
        f"{file.relative_to(ROOT)}: {target} does not exist"
        for file in files
        for target in links(file.read_text(encoding="utf-8"))
        if not (file.parent / target).exists()
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_only_relative_links_are_looked_up() -> None:
    text = "[a](b/c.md) [d](https://e.org/f) [g](#h) ![i](j.png#k) `[0](1 2)`"
    assert links(text) == ["b/c.md", "j.png"]


def test_few_modules_lie_at_the_top() -> None:
    modules = sorted(f for f in git_files() if re.fullmatch(r"dakrun/\w+\.py", f))
    assert len(modules) <= MAX_TOP_MODULES, modules


def test_every_folder_says_what_it_holds() -> None:
    folders = python_folders()
    assert "dakrun" in folders and "dakrun/plan" in folders
    for folder in folders:
        init = ROOT / folder / "__init__.py"
        assert init.is_file(), f"{folder}: has no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), (
            f"{init}: no docstring"
        )
