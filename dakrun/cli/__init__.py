"""The `dakrun` command line.

generate.py, validate.py, plan.py, bench.py and evaluate.py have the commands of these names,
main.py the others, ray.py the end of generate --ray, suggested.py the sampling that a model
suggests. options.py has the options that several commands share, option_kinds.py the kinds of
options; lookups.py finds the models and profiles that options name, rows.py checks the rows of
prompt files. doctor.py has the checks of `dakrun doctor`, console.py prints, and errors.py turns
exceptions into error lines and exit codes. The commands import the folders that do the work when
they run.
"""

from dakrun.cli.main import main

__all__ = ["main"]
