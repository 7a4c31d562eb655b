"""Compares `dakrun generate` with and without drafts, on requests that drafts suit and do not suit.

    python tests/tools/draft_speed.py --model SmolLM2-7B --ratio 0.48 --batch-size 64
    python tests/tools/draft_speed.py --model llama-3-8b --files ragged.jsonl --modes off,auto \\
        --runs 3 -- --load-format dummy

The model needs a chat template and must be able to copy; tile_model.py makes a large one of a small
one. The files of requests are the same in every run:

    copy     256 texts of about 150 to 400 tokens: a third to repeat with one word changed, a third
             to write as a list, a third to take records from; the prompt begins the answer
    chat     64 short questions, no two alike; in a batch of 64 rows, the slowest answer decides
    random   64 prompts of random token ids; answers are sampled, so that hardly any text repeats
    FILE     any other requests

Every mode runs in a process of its own, the modes in turn, --runs times. For each file and mode
but the first a line says: the ratio of tokens/s to the first mode's, and both (medians); the tokens
that a step gave a row; the share of drafts accepted; the seconds of both; the seconds and numbers
of their steps; the seconds that the plan predicts for the file without drafts; and how many answers
are equal (in 16 bits, rounding may change some). Tokens/s are `tokens_per_s` of the report: new
tokens over `time.wall_s`, which counts from the first request to the last result, prompts included.
Loading the model and capturing graphs end before, and do not count.

--folder keeps the requests, results and reports. Options behind `--` are those of generate.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = {"copy": 256, "chat": 64, "random": 64}
NEW = {"copy": 96, "chat": 128, "random": 48}  # new tokens at most
RANDOM_PROMPT = 128
TEMPERATURE = 1.0  # of the requests of random ids: greedy answers to them repeat themselves

THINGS = (
    "river stone lamp garden window market bridge letter kettle ladder candle basket orchard "
    "harbour blanket hammer mirror saddle barrel violin lantern feather pillow thimble wagon anchor"
)
NAMES = (
    "Alice Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Louis Marta Nadia Oscar Paula"
)
COLOURS = "red blue green white black grey brown yellow"
FIELDS = {
    "name": NAMES,
    "friend": NAMES,
    "town": "Bolton Carlow Dalton Epsom Fulham Gorton Halton Ilford Kendal Ludlow Malton Norton",
    "thing": THINGS,
    "other": THINGS,
    "colour": COLOURS,
    "shade": COLOURS,
    "deed": "bought sold found lost carried painted repaired borrowed",
}
SENTENCES = (
    "{name} {deed} {count} {colour} {thing}s in {town} and took them to the {other}.",
    "In {town} the {colour} {thing} stood beside a {shade} {other} for {count} days.",
    "{name} wrote to {friend} that the {thing} from {town} was {colour}, and the {other} {shade}.",
    "After {count} years {name} came back to {town} with a {colour} {thing} and a {shade} {other}.",
)
ENTRY = "{count} {colour} {thing}s and a {shade} {other} for {name} in {town}"
RECORD = "order {id}, customer {name} {town}, {count} {colour} {thing}s, paid {paid} on {day} May"

SUBJECTS = (
    "volcanoes", "bees", "bread", "glaciers", "chess", "bicycles", "tea", "earthquakes",
    "libraries", "sailing", "cheese", "owls", "bridges", "gardening", "trains", "mountains",
)  # fmt: skip
QUESTIONS = (
    "What should a beginner know about {}?",
    "Write a short story in which {} matter.",
    "Name three surprising facts about {}.",
    "How did people think about {} two hundred years ago?",
)


def fill(template: str, chance: random.Random) -> str:
    """The template with words drawn for its fields."""
    words = {field: chance.choice(some.split()) for field, some in FIELDS.items()}
    return template.format(
        **words, count=chance.randint(2, 97), id=chance.randint(1000, 9999),
        paid=f"{chance.randint(10, 999)}.{chance.randint(10, 99)}", day=chance.randint(1, 30),
    )  # fmt: skip


def copying(number: int, chance: random.Random) -> tuple[str, str]:
    """A request that copies or edits its text, and the beginning of the answer."""
    kind = number % 3
    if kind == 0:
        parts = [fill(chance.choice(SENTENCES), chance) for _ in range(chance.randint(8, 19))]
        text = " ".join(parts)
        old = chance.choice([thing for thing in THINGS.split() if thing in text])
        new = chance.choice([thing for thing in THINGS.split() if thing not in text] or ["whistle"])
        begun = " ".join(text.split()[:6]).replace(old, new)
        task = f"Repeat this text, but with the word {new} in place of the word {old}:\n\n{text}"
        return task, f"Here is the text:\n\n{begun}"
    if kind == 1:
        parts = [fill(ENTRY, chance) for _ in range(chance.randint(10, 24))]
        task = "Write each entry of this list on a line of its own, behind a dash:\n\n"
        begun = f"- {parts[0]}\n- {parts[1]}\n-"
        return task + "; ".join(parts), f"Here is the list:\n\n{begun}"
    parts = [fill(RECORD, chance) for _ in range(chance.randint(5, 11))]
    task = "Take the orders from this letter, and write one a line:\n\n"
    letter = f"Dear {chance.choice(NAMES)}, these orders came in: {'; then '.join(parts)}. Thanks!"
    return task + letter, f"Here are the orders:\n\n{parts[0]}\n{parts[1]}\norder"


def requests(file: str, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the file called copy, chat or random, for a model with this config.json."""
    chance = random.Random(file)
    for number in range(ROWS[file]):
        row: dict[str, Any] = {"id": f"{file}-{number}", "max_tokens": NEW[file]}
        if file == "copy":
            task, begun = copying(number, chance)
            row["messages"] = [
                {"role": "user", "content": task},
                {"role": "assistant", "content": begun},
            ]
            row |= {"continue_final_message": True, "add_generation_prompt": False}
        elif file == "chat":
            subject = SUBJECTS[number % len(SUBJECTS)]
            question = QUESTIONS[number // len(SUBJECTS)].format(subject)
            row["messages"] = [{"role": "user", "content": question}]
        else:
            length = min(RANDOM_PROMPT, config["max_position_embeddings"] // 4)
            ids = [chance.randrange(3, config["vocab_size"]) for _ in range(length)]
            row |= {"prompt_token_ids": ids, "ignore_eos": True, "temperature": TEMPERATURE}
            row["seed"] = number
        yield row


def run(
    source: Path, mode: str, end: float, options: Sequence[str], folder: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The report of a run of the file with --speculate `mode`, and its texts by id.

    Raises RuntimeError if the run fails, or is not done at the time `end`.
    """
    name = f"{source.stem}-{mode.replace(':', '')}"
    results, report = folder / f"{name}.results.jsonl", folder / f"{name}.report.json"
    command = [
        *(sys.executable, "-m", "dakrun", "generate", "-i", source, "-o", results, "--overwrite"),
        *("--report", report, "--speculate", mode, *options),
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    left = end - time.monotonic()
    try:
        done = subprocess.run(
            list(map(str, command)), env=environment, timeout=left, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name}: not done after {left:.0f} s, see --max-seconds") from None
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr.strip()[-2000:]}")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return json.loads(report.read_text()), {row["id"]: str(row.get("text")) for row in rows}


def steps(times: Mapping[str, float]) -> str:
    """The seconds and number of a run's steps without prompts, then of those with some."""
    decode = f"{times['decode_s']:.2f} s for {times['decode_steps']:,}"
    return f"{decode} + {times['prefill_s']:.2f} s for {times['prefill_steps']:,} with prompts"


def line(
    file: str,
    modes: tuple[str, str],
    reports: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    equal: tuple[int, int],
) -> str:
    """The comparison of two modes by the reports of their runs; `equal` of so many answers are."""
    rates = [[report["tokens_per_s"] for report in some] for some in reports]
    plain, drafting = map(statistics.median, rates)
    walls = [statistics.median(report["time"]["wall_s"] for report in some) for some in reports]
    said = [
        f"{file}, {modes[1]}: {drafting / plain:.3f} x {modes[0]}",
        f"{plain:,.1f} and {drafting:,.1f} tokens/s",
    ]
    if len(rates[0]) > 1:
        each = ", ".join(f"{b / a:.3f}" for a, b in zip(*rates, strict=True))
        said.append(f"medians of {len(rates[0])} runs ({each})")
    if drafts := reports[1][-1]["drafts"]:
        share = drafts["accepted_tokens"] / max(1, drafts["drafted_tokens"])
        said.append(f"{drafts['tokens_per_step_and_row']:.2f} tokens a row and step")
        said.append(f"{share:.1%} of {drafts['drafted_tokens']:,} drafts accepted")
    said.append(f"{walls[0]:.1f} and {walls[1]:.1f} s")
    said.append(f"steps {' and '.join(steps(some[-1]['time']) for some in reports)}")
    if predicted := reports[1][-1]["time"].get("predicted_s"):
        said.append(f"predicted without drafts {predicted:.1f} s")
    return "; ".join([*said, f"{equal[0]} of {equal[1]} answers equal"])


def main() -> int:
    """Run the files that are asked for; 1 if a run failed."""
    parser = argparse.ArgumentParser(description="Compare runs with drafts and without.")
    parser.add_argument("--model", required=True, help="a checkpoint's folder, or a known name")
    parser.add_argument("--ratio", help="ratio of the weights on the host; KV is then in HBM")
    parser.add_argument("--batch-size", default="64")
    parser.add_argument("--files", default="copy,chat,random", help="copy, chat, random, or files")
    parser.add_argument(
        "--modes", default="off,suffix", help="of --speculate; the first is the base"
    )
    parser.add_argument("--runs", type=int, default=1, help="of each mode")
    parser.add_argument("--rows", type=int, help="use only the first N of copy, chat, random")
    parser.add_argument("--max-seconds", type=float, default=3600, help="for everything")
    parser.add_argument("--folder", type=Path, help="where files are kept; default: nowhere")
    parser.add_argument("options", nargs="*", help="options of generate, behind --")
    given = parser.parse_args()
    end = time.monotonic() + given.max_seconds
    options = ["--model", given.model, "--batch-size", given.batch_size, *given.options]
    if given.ratio is not None:
        options += ["--offload-ratio", given.ratio, "--kv-offload-ratio", "0"]
    files, modes = given.files.split(","), given.modes.split(",")
    config_file = Path(given.model) / "config.json"
    if ROWS.keys() & files and not config_file.is_file():
        parser.error("copy, chat and random need the folder of a checkpoint as --model")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            source = Path(file)
            if file in ROWS:
                source = folder / f"{file}.jsonl"
                config = json.loads(config_file.read_text())
                rows = itertools.islice(requests(file, config), given.rows)
                source.write_text("".join(json.dumps(row) + "\n" for row in rows))
            reports: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
            texts = dict[str, dict[str, str]]()
            try:
                for mode in modes * given.runs:
                    report, texts[mode] = run(source, mode, end, options, folder)
                    reports[mode].append(report)
            except RuntimeError as problem:
                sys.stderr.write(f"{problem}\n")
                return 1
            base = modes[0]
            for mode in modes[1:]:
                same = sum(text == texts[base].get(row) for row, text in texts[mode].items())
                found = (reports[base], reports[mode])
                said = line(file, (base, mode), found, (same, len(texts[mode])))
                sys.stdout.write(said + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
