"""The wheel and the sdist hold what runs need, runs find it, and README's tree names all of it."""

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built here with the backend itself: no network."""
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


def tree(readme: str) -> list[str]:
    """The paths that the annotated tree of `readme` names, folders with a slash at the end."""
    block = re.search(r"^## Where things are\n+```\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert block, "README.md has no tree under 'Where things are'"
    paths: list[str] = []
    above: list[str] = []
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        above = [*above[:depth], name]
        paths.append("".join(above))
    return paths


def untrue(named: list[str], files: set[str]) -> list[str]:
    """What of the tree `named` does not exist, and which of `files` it leaves out.

    A folder with nothing below it in the tree stands for all that it holds; another one stands for
    its `__init__.py`.
    """
    folders = [path for path in named if path.endswith("/")]
    whole = tuple(f for f in folders if not any(p != f and p.startswith(f) for p in named))
    told = {*named, *(f"{folder}__init__.py" for folder in folders)}
    there = files | {f"{folder}/" for file in files for folder in map(str, Path(file).parents)}
    left_out = sorted(file for file in files - told if not file.startswith(whole))
    return [
        *(f"{p}: is in README.md's tree, but does not exist" for p in named if p not in there),
        *(f"{file}: add a line for it to the tree in README.md" for file in left_out),
    ]


def git_files(*arguments: str) -> set[str]:
    """What `git ls-files` lists, less what was deleted."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("which files belong to dakrun is known in a git checkout alone")
    listed = subprocess.run(
        ["git", "ls-files", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip(listed.stderr)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def test_the_tree_in_the_readme_is_true() -> None:
    new = ("--others", "--exclude-standard", "dakrun", "native", "profiles", "tests")
    files = git_files() | git_files(*new)
    named = tree((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(named) == len(set(named))
    found = untrue(named, files)
    assert not found, "\n" + "\n".join(found)


def test_an_untrue_tree_is_found() -> None:
    lines = (
        "dakrun/",
        "  cli.py   a",
        "  gone.py  b c",
        "  plan/    d",
        "    ops.py  e",
        "native/  f",
    )
    named = tree("\n".join(("## Where things are", "", "```", *lines, "```", "")))
    assert named == [
        *("dakrun/", "dakrun/cli.py", "dakrun/gone.py", "dakrun/plan/", "dakrun/plan/ops.py"),
        "native/",
    ]
    files = {"dakrun/__init__.py", "dakrun/cli.py", "dakrun/plan/ops.py", "dakrun/plan/new.py"}
    assert untrue(named, files | {"native/any/kernel.cu", "Makefile"}) == [
        "dakrun/gone.py: is in README.md's tree, but does not exist",
        "Makefile: add a line for it to the tree in README.md",
        "dakrun/plan/new.py: add a line for it to the tree in README.md",
    ]
