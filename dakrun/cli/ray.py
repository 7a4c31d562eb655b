"""`dakrun generate --ray`: checks of its options, and the run's report."""

import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dakrun.cli.console import eprint, quiet_stderr, stderr_console
from dakrun.errors import EXIT_FAILED, CannotRun, UsageError


def refuse_options(*, ordered: bool, verbose: bool, changed: bool, retry_failed: bool) -> None:
    """Raise UsageError for options of generate that --ray does not have."""
    for name, given, hint in (
        ("ordered", ordered, "drop it: parts have ids"),
        ("verbose", verbose, "drop it: --report has each worker's ops and tiers"),
        ("changed", changed, "drop it, or run without --ray"),
        ("retry-failed", retry_failed, "drop it, or run without --ray"),
    ):
        if given:
            raise UsageError(f"--{name} does not go with --ray", hint=hint)


def run_on_ray(
    *,
    address: str,
    workers: int | None,
    part_format: Any,
    report_path: str | None,
    quiet: bool,
    **job: Any,
) -> int:
    """Run generate on the cluster at `address`; `job` are other arguments of generate_on_ray.

    With `quiet` nothing is shown but errors, and the numbers of rows if some failed.

    Returns the exit code. Raises UsageError or CannotRun.
    """
    from dakrun.generate import check_report, write_report

    if report_path is not None:
        check_report(
            report_path, source=job["source"], output=job["output"], profile=str(job["run"].profile)
        )
        if Path(report_path).resolve().parent == Path(job["output"]).resolve():
            raise UsageError(
                f"{report_path}: lies in the folder of the results", hint="put --report elsewhere"
            )
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise CannotRun("--ray needs Ray, which is not installed", hint="pip install 'dakrun[ray]'")
    from dakrun.ray.run import RayOptions, generate_on_ray, render

    console = stderr_console()
    with redirect_stdout(sys.stderr):  # to which Ray writes of workers that have died
        report, counts = generate_on_ray(
            on=RayOptions(address=address, workers=workers, part_format=part_format),
            console=console if sys.stderr.isatty() and not quiet else None,
            note=(lambda note: None) if quiet else eprint,
            **job,
        )
    if report_path is not None:
        write_report(report, Path(report_path))
    failed = counts.failed or counts.failed_before
    if not quiet:
        with quiet_stderr():
            render(report, console)
    if failed or not quiet:
        eprint(counts.summary(can_retry=False))
    return EXIT_FAILED if failed else 0
