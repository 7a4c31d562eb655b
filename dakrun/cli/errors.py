"""Error lines and exit codes: every failure of a command becomes an `error:` and a `hint:` line.

Knows click and the exceptions that end a command, but no command.
"""

import errno
import os
import sys
import traceback
from typing import Any

import click

from dakrun.cli.console import eprint
from dakrun.errors import (
    EXIT_CANNOT_RUN,
    EXIT_FAILED,
    EXIT_USAGE,
    CannotRun,
    DakrunError,
    GpuFailed,
)
from dakrun.interrupt import Interrupted, exit_code, raise_on_signals

_FREE_SPACE = "free some disk space, then run it again"
_PERMISSIONS = "check its permissions, or name another place"
_MEMORY = "free some memory, or lower --batch-size or --max-model-len"
_HINTS = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EROFS: "name a place that can be written",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file, not a folder",
    errno.EISDIR: "name a file, not a folder",
    errno.ENAMETOOLONG: "check the path; names have up to 255 bytes",
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "name a place that takes larger files, or raise the limit: ulimit -f",
    errno.EMFILE: "raise the number of open files: ulimit -n",
    errno.ENOMEM: _MEMORY,
}
_OTHER_HINT = "check the file, its permissions and the disk; DAKRUN_DEBUG=1 shows where it happened"


class ErrorLines(click.Group):
    """A click group that turns every failure into an `error:` and a `hint:` line and an exit code.

    A command returns its exit code, or None for 0. With DAKRUN_DEBUG=1 the traceback is printed
    before the error.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line and exit."""
        try:
            _check_streams()
            with raise_on_signals():
                code = super().main(
                    *args, **{"prog_name": "dakrun", **kwargs, "standalone_mode": False}
                )
                sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as no_command:
            no_command.show()
            code = EXIT_USAGE
        except click.ClickException as problem:
            code = problem.exit_code
            _report(problem, problem.format_message(), _help_hint(problem))
        except click.Abort as abort:
            eprint("interrupted")
            code = exit_code(abort.__cause__)
        except Interrupted as stop:
            eprint(f"interrupted: {stop}; {stop.hint}")
            code = stop.exit_code
        except DakrunError as problem:
            code = problem.exit_code
            _report(problem, str(problem), problem.hint)
            if isinstance(problem, GpuFailed):
                _exit_at_once(code)
        except BrokenPipeError:  # the program that reads our output has ended
            _discard_stdout()
            code = EXIT_FAILED
        except OSError as problem:
            code = EXIT_CANNOT_RUN
            _report(problem, _describe(problem), _HINTS.get(problem.errno or 0, _OTHER_HINT))
        except MemoryError as problem:
            code = EXIT_CANNOT_RUN
            _report(problem, f"memory ran out{f': {problem}' if str(problem) else ''}", _MEMORY)
        except Exception as problem:
            code = EXIT_FAILED
            what = f"internal: {type(problem).__name__}: {problem}"
            _report(problem, what, "set DAKRUN_DEBUG=1 to see where, and report it as a bug")
        sys.exit(code)


def _check_streams() -> None:
    """Raise CannotRun if stdout is closed; replace a closed stderr by /dev/null."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise CannotRun("standard output is closed", hint="leave it open, or send it to /dev/null")


def _report(problem: Exception, message: str, hint: str) -> None:
    if os.environ.get("DAKRUN_DEBUG") == "1":
        traceback.print_exception(problem)
    eprint(f"error: {_one_line(message)}\nhint: {_one_line(hint)}")


def _exit_at_once(code: int) -> None:
    """Exit without destructors: those of CUDA objects would report the GPU's failure again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _help_hint(problem: click.ClickException) -> str:
    context = getattr(problem, "ctx", None)
    return f"see: {context.command_path if context else 'dakrun'} --help"


def _describe(problem: OSError) -> str:
    """The file, if there is one, and the system's error message."""
    reason = problem.strerror or str(problem) or type(problem).__name__
    if problem.filename is not None:
        return f"{problem.filename}: {reason}"
    try:
        sys.stdout.flush()
    except OSError:  # writing to stdout failed: the unwritten rest is still in its buffer
        _discard_stdout()
        return f"standard output: {reason}"
    return reason


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
