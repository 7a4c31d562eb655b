"""The `dakrun` command line.

generate.py, plan.py, bench.py and evaluate.py have the commands of these names, main.py the others,
ray.py the end of generate --ray, options.py the options that several share, of the kinds in
option_kinds.py; lookups.py finds the models and profiles that they name. doctor.py has the checks
of `dakrun doctor`, console.py prints, and errors.py turns exceptions into error lines and exit
codes. The commands import the folders that do the work when they run.
"""

from dakrun.cli.main import main

__all__ = ["main"]
