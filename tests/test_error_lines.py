"""How commands end where the process itself counts: what runs at exit, and what is written."""

import subprocess
import sys

FAILING = """
import atexit, click
from dakrun import errors
from dakrun.error_lines import ErrorLines
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


def test_a_gpu_that_failed_is_not_asked_again_at_exit() -> None:
    found = run("GpuFailed")
    assert (found.returncode, found.stdout) == (3, "a row\n")
    assert found.stderr == "error: it failed\nhint: try again\n"


def test_other_errors_leave_what_is_registered_its_turn() -> None:
    found = run("CannotRun")
    assert (found.returncode, found.stdout) == (3, "a row\nat exit\n")
