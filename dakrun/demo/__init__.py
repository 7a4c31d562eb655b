"""`dakrun demo`: a tiny bundled model, half of it offloaded, answers sums it was not trained on.

Takes the same path as `dakrun generate`, from a prompt file to a report. task.py has the sums,
train.py trains the model, model/ is its checkpoint.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dakrun.config import SamplingParams
from dakrun.demo import task
from dakrun.generate import BatchJob
from dakrun.llm import LLM
from dakrun.plan import Policy
from dakrun.requests import RequestReader, ResultWriter

MODEL = Path(__file__).parent / "model"
MAX_TOKENS = 8
BATCH_SIZE = 32


@dataclass(frozen=True)
class DemoResult:
    """The demo's answers, (prompt, answer, right) for each sum, and the run's report."""

    answers: list[tuple[str, str, bool]]
    report: dict[str, Any]

    @property
    def right(self) -> int:
        """Number of right answers."""
        return sum(right for _, _, right in self.answers)


def run(console: Console | None, *, threads: int | None = None) -> DemoResult:
    """Answer the 200 held-out sums with half of the weights and half of the KV cache remote."""
    pairs = task.held_out()
    with (
        LLM(
            MODEL,
            device="cpu",
            batch_size=BATCH_SIZE,
            expected_tokens=MAX_TOKENS,
            policy=Policy(offload_ratio=0.5, kv_offload_ratio=0.5),
            threads=threads,
        ) as llm,
        tempfile.TemporaryDirectory() as folder,
    ):
        prompts, output = Path(folder) / "prompts.txt", Path(folder) / "answers.jsonl"
        prompts.write_text("".join(f"{task.prompt(a, b)}\n" for a, b in pairs), encoding="utf-8")
        start = time.perf_counter()
        with (
            RequestReader(prompts, defaults=SamplingParams(max_tokens=MAX_TOKENS)) as reader,
            ResultWriter(output, source=prompts) as writer,
            BatchJob(llm, reader, writer, console) as job,
        ):
            job.run()
        report = llm.report(time.perf_counter() - start)
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    texts = {row["id"]: row["text"] for row in rows}
    answers = [
        (task.prompt(a, b), texts[f"line-{line}"], task.is_right(a, b, texts[f"line-{line}"]))
        for line, (a, b) in enumerate(pairs, 1)
    ]
    return DemoResult(answers, report)
