"""The tool that runs gpu tests under compute-sanitizer, with a stand-in for it, without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import sanitize

from dakrun.kernels.runtime import jit

ROOT = sanitize.ROOT
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}
PASSED = "12 passed, 1 warning in 61.20s (0:01:01)"
STAND_IN = f"""#!{sys.executable} -IS
import json, os, sys, time
if "--help" in sys.argv:
    sys.exit(print("--kernel-name --report-api-errors"))
saying = json.loads(os.environ["SAYING"])
tool = sys.argv[sys.argv.index("--tool") + 1]
log = sys.argv[sys.argv.index("--log-file") + 1]
with open(log + ".json", "w") as file:
    json.dump([sys.argv, os.environ["SANITIZE_TOOL"], os.getpid()], file)
with open(log, "w") as file:
    file.write(f"========= COMPUTE-SANITIZER\\n{{saying[tool]}}\\n")
print("....\\n" + saying["pytest"])
time.sleep(saying.get("sleeps", 0))
sys.exit(saying.get("status", 0))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compute-sanitizer"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return path


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **saying: object) -> int:
    said = {tool: f"========= {line}" for tool, line in CLEAN.items()} | {"pytest": PASSED}
    monkeypatch.setenv("SAYING", json.dumps(said | saying))
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--output", str(tmp_path), *options])
    return sanitize.main()


def test_each_tool_runs_each_group(
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(tmp_path, monkeypatch, "limits", "runs") == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line.split()[:3] for line in lines] == [
        ["ok", "limits", "memcheck"],
        ["ok", "limits", "racecheck"],
        ["ok", "limits", "synccheck"],
        ["ok", "runs", "memcheck"],
    ]
    assert all(line.endswith(PASSED) for line in lines)
    for tool in sanitize.TOOLS:
        command, told, _ = json.loads((tmp_path / f"limits-{tool}.txt.json").read_text())
        assert told == tool and ("--kernel-name" in command) == (tool == "racecheck")
        assert command[command.index("--limits") + 1] == "12.0"
        assert command[-1] == sanitize.GROUPS["limits"]["tests"][-1]


RACE = "Race reported between Write access at splitk_gemm and Read access"


@pytest.mark.parametrize(
    "saying",
    [
        {"memcheck": "========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error"},
        {"racecheck": f"{RACE}\nRACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"},
        {"synccheck": "========= COMPUTE"},
        {"status": 9},
        {"pytest": "1 failed, 11 passed in 3.00s"},
        {"pytest": "11 passed, 1 skipped in 3.00s", "status": 0},
        {"pytest": "12 skipped in 3.00s"},
        {"pytest": "Segmentation fault"},
    ],
    ids=str,
)
def test_what_is_not_clean(
    saying: dict[str, object],
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A finding under one tool, or, under all, tests that failed or were not run."""
    assert ended(tmp_path, monkeypatch, "drafts", **saying) == 1
    out = capsys.readouterr().out
    (one,) = saying.keys() & CLEAN.keys() or ("all",)
    assert out.count("NOT OK drafts") == (3 if one == "all" else 1), out
    assert ("1 x Invalid __global__ read" in out) == (one == "memcheck")
    assert (f"1 x {RACE}" in out) == (one == "racecheck")


def test_what_takes_too_long_is_ended(
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "drafts", "--tool", "memcheck", "--seconds", "2"
    assert ended(tmp_path, monkeypatch, *options, sleeps=600) == 1
    assert re.search(r"NOT OK drafts +memcheck +2 s: .*out of time", capsys.readouterr().out)
    _, _, process = json.loads((tmp_path / "drafts-memcheck.txt.json").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, said in (("other", "no group other"), ("--sanitizer=none-here", "no none-here")):
        with pytest.raises(SystemExit, match="2"):
            ended(tmp_path, monkeypatch, option)
        assert re.search(f"error: {said}; hint: ", capsys.readouterr().err)


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_kernels_are_compiled_for_racecheck(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("held_macros", "cache_dir"):
        monkeypatch.setattr(jit, name, getattr(jit, name))
    monkeypatch.setenv("SANITIZE_CACHE", str(tmp_path))
    monkeypatch.setenv("SANITIZE_TOOL", tool)
    sanitize.pytest_configure()
    assert jit.held_macros() == ({"RACECHECK": 1} if tool == "racecheck" else {})
    assert jit.cache_dir() == tmp_path


def test_all_kernels_are_known() -> None:
    count = sum(path.read_text().count("__global__") for path in ROOT.glob("native/*.cu"))
    assert len(set(sanitize.kernels())) == count > 20


@pytest.mark.full
def test_all_tests_exist() -> None:
    tests = [test for group in sanitize.GROUPS.values() for test in group["tests"]]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *set(tests)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:]
    assert set(tests) <= set(ended.stdout.splitlines())
