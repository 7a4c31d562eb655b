"""How commands end, in processes of their own: exit functions, exit codes and closed streams."""

import pickle
import subprocess
import sys

import pytest

from dakrun.demo import MODEL
from dakrun.errors import OutOfGpuMemory

FAILING = """
import atexit, click
from dakrun import errors
from dakrun.cli.errors import ErrorLines
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
    """Run `dakrun` with arguments and redirections in shell syntax."""
    command = ["sh", "-c", f'"$0" -m dakrun {arguments}', sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_exit_functions_do_not_run_after_a_gpu_failure() -> None:
    found = run("GpuFailed")
    assert (found.returncode, found.stdout) == (3, "a row\n")
    assert found.stderr == "error: it failed\nhint: try again\n"


def test_exit_functions_run_after_other_errors() -> None:
    found = run("CannotRun")
    assert (found.returncode, found.stdout) == (3, "a row\nat exit\n")


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "message"),
    [
        (">&-", "--help", 3, "standard output is closed"),
        ("<&-", f"generate --model {MODEL} -i - -o - --profile cpu", 2, "standard input is closed"),
    ],
)
def test_closed_streams(closed: str, arguments: str, code: int, message: str) -> None:
    found = dakrun(f"{arguments} {closed}")
    assert (found.returncode, found.stdout) == (code, "")
    assert found.stderr.splitlines()[0] == f"error: {message}"


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_the_exit_code_of_an_error_that_cannot_be_printed(stderr: str) -> None:
    found = dakrun(f"plan --model none --profile cpu {stderr}")
    assert (found.returncode, found.stdout, found.stderr) == (2, "", "")


def test_errors_can_be_pickled() -> None:
    problem = OutOfGpuMemory("full", hint="free some", missing=7)
    again = pickle.loads(pickle.dumps(problem))
    assert type(again) is OutOfGpuMemory and str(again) == "full"
    assert (again.hint, again.missing, again.exit_code) == ("free some", 7, 3)
