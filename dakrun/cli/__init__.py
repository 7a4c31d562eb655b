"""The `dakrun` command line.

generate.py, plan.py, bench.py and evaluate.py have the commands of these names, main.py the others,
ray.py the end of generate --ray, options.py the options that several share. doctor.py has the
checks of `dakrun doctor`, console.py prints, and errors.py turns exceptions into error lines and
exit codes. The commands import the folders that do the work when they run.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dakrun.cli.bench import OPTIONS_OF
from dakrun.cli.errors import ErrorLines
from dakrun.cli.main import main

if TYPE_CHECKING:
    from dakrun.cli.doctor import Check, can_generate, examine, render, verdict

__all__ = [
    "OPTIONS_OF",
    "Check",
    "ErrorLines",
    "can_generate",
    "examine",
    "main",
    "render",
    "verdict",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("dakrun.cli.doctor"), name)
