"""How commands end where the process itself counts: what runs at exit, and what is written."""

import subprocess
import sys

import pytest

FAILING = """
import atexit, click
from dakrun import errors
from dakrun.cli import ErrorLines
atexit.register(print, "at exit")

@click.command(cls=ErrorLines, invoke_without_command=True)
def main():
    print("a row")
    raise errors.{error}("it failed", hint="try again")

main([])
"""


def run(error: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FAILING.format(error=error)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def dakrun(arguments: str) -> subprocess.CompletedProcess[str]:
    """`dakrun` with arguments and redirections as a shell takes them."""
    command = ["sh", "-c", f'"$0" -m dakrun {arguments}', sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_gpu_that_failed_is_not_asked_again_at_exit() -> None:
    found = run("GpuFailed")
    assert (found.returncode, found.stdout) == (3, "a row\n")
    assert found.stderr == "error: it failed\nhint: try again\n"


def test_other_errors_leave_what_is_registered_its_turn() -> None:
    found = run("CannotRun")
    assert (found.returncode, found.stdout) == (3, "a row\nat exit\n")


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "message"),
    [
        (">&-", "--help", 3, "standard output is closed"),
        ("<&-", "generate --model none -i - -o - --profile cpu", 2, "standard input is closed"),
    ],
)
def test_closed_streams(closed: str, arguments: str, code: int, message: str) -> None:
    found = dakrun(f"{arguments} {closed}")
    assert (found.returncode, found.stdout) == (code, "")
    assert found.stderr.splitlines()[0] == f"error: {message}"


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_told_has_its_exit_code(stderr: str) -> None:
    found = dakrun(f"convert none . {stderr}")
    assert (found.returncode, found.stdout, found.stderr) == (2, "", "")
