"""Runs small gpu tests under memcheck, racecheck and synccheck of compute-sanitizer, all at once.

    python tests/tools/sanitize.py [GROUP ...] [--tool racecheck] [--seconds 300]

Needs a GPU. sanitize.toml has the groups; without GROUP, all run. Prints a line for each group and
tool, with the tool's summary and pytest's last line, and the findings below it. Exit status 1: a
finding, or tests that failed or did not run (skipped, or out of time). Logs are kept in
build/sanitize, or --output. Compiled kernels are kept there too, for the next run.

racecheck sees the project's kernels alone, compiled with RACECHECK=1 (native/README.md).
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUPS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TOOLS = "racecheck", "memcheck", "synccheck"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tools.sanitize")
FOUND = re.compile("Invalid|Race|hazard detected|Barrier error|Divergent|Program hit|Misaligned")


def pytest_configure() -> None:
    """As a plugin of pytest: one cache of kernels for all tests, and for racecheck its macro."""
    from dakrun.kernels.runtime import jit

    if folder := os.environ.get("SANITIZE_CACHE"):
        plain, races = jit.held_macros, os.environ["SANITIZE_TOOL"] == "racecheck"
        jit.cache_dir = lambda: Path(folder)
        jit.held_macros = lambda: {**plain(), **({"RACECHECK": 1} if races else {})}


def kernels() -> list[str]:
    """The names of all kernels of native/."""
    texts = [path.read_text() for path in sorted((ROOT / "native").glob("*.cu"))]
    return re.findall(r"__launch_bounds__\([^)]*\)\s+(\w+)\(", "\n".join(texts))


@dataclass(frozen=True)
class Check:
    """A group of tests under one tool, in a process of its own."""

    group: str
    tool: str
    folder: Path

    def file(self, suffix: str) -> Path:
        """What pytest said (.log), or the tool (.txt)."""
        return self.folder / f"{self.group}-{self.tool}{suffix}"

    def begin(self, sanitizer: str, known: str) -> "subprocess.Popen[bytes]":
        """`known` is the sanitizer's help, with the options that its version has."""
        command = [sanitizer, "--tool", self.tool, "--error-exitcode", "9"]
        command += ["--log-file", str(self.file(".txt"))]
        if "--report-api-errors" in known:
            command += ["--report-api-errors", "no"]
        if self.tool == "racecheck" and "--kernel-name" in known:
            command += ["--kernel-name", ",".join(f"kernel_substring={name}" for name in kernels())]
        group = GROUPS[self.group]
        command += [sys.executable, *PYTEST, *group.get("options", ()), *group["tests"]]
        paths = str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "2"}
        more |= {"SANITIZE_CACHE": str(self.folder / "cache"), "SANITIZE_TOOL": self.tool}
        self.file(".txt").write_text("")
        with self.file(".log").open("wb") as out:
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | more, start_new_session=True,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def report(self, status: int | None, seconds: float) -> tuple[bool, list[str]]:
        """Whether all tests ran without a finding, and lines to print. No `status`: out of time."""
        said, log = (self.file(suffix).read_text(errors="replace") for suffix in (".txt", ".log"))
        closings = re.findall(r"^(?:=+ )?(\d+ \w+.* in \d[\d.]*s\b.*?)(?: =+)?$", log, re.MULTILINE)
        closing = "out of time" if status is None else closings[-1] if closings else "no test ran"
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
        counts = map(int, re.findall(r"\d+", " ".join(summaries)))
        ran = re.match(r"\d+ passed(, \d+ warnings?)? in", closing)
        good = bool(status == 0 and ran and summaries and not any(counts))
        lines = [
            f"{'ok' if good else 'NOT OK':6s} {self.group:9s} {self.tool:9s} {seconds:4.0f} s: "
            f"{'; '.join(summaries) or 'no summary'}; {closing}"
        ]
        found = Counter(line.strip("= ") for line in said.splitlines() if FOUND.search(line))
        lines += [f"    {count} x {line[:160]}" for line, count in found.most_common(6)]
        problems = re.findall(r"^(?:E  |ERROR|\S*Error: ).*", "" if good else log, re.MULTILINE)
        return good, [*lines, *(f"    {line[:160]}" for line in problems[:6])]


def run(checks: Sequence[Check], sanitizer: str, seconds: float) -> bool:
    """Run all at once, for at most `seconds`; True if all passed without a finding."""
    known = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    begun, all_good = time.monotonic(), True
    running = {check: check.begin(sanitizer, known) for check in checks}
    try:
        while running:
            passed = time.monotonic() - begun
            for check, process in list(running.items()):
                if (status := process.poll()) is None and passed < seconds:
                    continue
                if status is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                del running[check]
                good, lines = check.report(status, passed)
                all_good &= good
                sys.stdout.write("\n".join(lines) + "\n")
                sys.stdout.flush()
            time.sleep(0.1)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
    return all_good


def main() -> int:
    parser = argparse.ArgumentParser(description="Run small gpu tests under compute-sanitizer.")
    parser.add_argument("group", nargs="*", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all three")
    parser.add_argument("--seconds", type=float, default=500, help="for everything; default: 500")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "sanitize")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its path")
    given = parser.parse_args()
    if unknown := set(given.group) - set(GROUPS):
        parser.error(f"no group {unknown.pop()}; hint: there are {', '.join(GROUPS)}")
    at = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    sanitizer = shutil.which(given.sanitizer, path=os.pathsep.join(at))
    if sanitizer is None:
        parser.error(f"no {given.sanitizer}; hint: --sanitizer takes its path")
    folder = given.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(group, tool) for tool in given.tool or TOOLS for group in given.group or GROUPS]
    wanted = [pair for pair in pairs if pair[1] in GROUPS[pair[0]].get("tools", TOOLS)]
    return 0 if run([Check(*pair, folder) for pair in wanted], sanitizer, given.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
