"""`dakrun generate` and `dakrun demo` from the command line, on the bundled model."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.demo import MODEL, task
from dakrun.engine import ReferenceRunner, Step
from dakrun.llm import LLM
from dakrun.resources import resource_dir

SUMS = [(47, 85), (3, 4), (99, 99), (20, 30)]


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], input=stdin)


def base(source: object, output: object, *more: object, model: Path = MODEL) -> list[object]:
    return ["--model", model, "-i", source, "-o", output, "--device", "cpu", *more]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows(path: Path) -> dict[str, Any]:
    parsed = read_lines(path)
    assert len({row["id"] for row in parsed}) == len(parsed)
    return {row["id"]: row for row in parsed}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{task.prompt(a, b)}\n" for a, b in SUMS), encoding="utf-8")
    return path


def test_threads_wait_without_spinning(prompts: Path, tmp_path: Path) -> None:
    """OMP_DISPLAY_ENV lets libgomp print what it read when torch was imported."""
    environment = {**os.environ, "OMP_DISPLAY_ENV": "true"}
    environment.pop("OMP_WAIT_POLICY", None)
    report = tmp_path / "report.json"
    arguments = ["generate", *base(prompts, tmp_path / "out.jsonl", "--threads", 2)]
    done = subprocess.run(
        [sys.executable, "-m", "dakrun", *map(str, [*arguments, "--report", report])],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr and "2 CPU threads" in done.stderr
    assert json.loads(report.read_text())["machine"]["threads"] == 2


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n")
    result = run(*base(source, out))
    assert result.exit_code == 0 and out.read_bytes() == b""
    assert result.stderr.endswith("0 rows done, 0 failed, 0 skipped; the input has no rows\n")
    checked = CliRunner().invoke(main, ["validate", "-i", str(source)])
    assert checked.exit_code == 0 and checked.stdout.startswith("there are no rows\n")


def test_the_summary_has_eight_lines_and_verbose_the_rest(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        result = run(*base(prompts, out, "--overwrite"))
        lines = result.stderr.splitlines()
        assert len(lines) <= 8 and max(map(len, lines)) <= 100
        first = [line.split()[0] for line in lines]
        assert first == ["model", "machine", "requests", "time", "throughput", "profile", "4"]
        assert lines[-1] == "4 rows done, 0 failed, 0 skipped"
    result = run(*base(prompts, out, "--overwrite", "--verbose"))
    assert {"tier", "attention", "TPOT", "EB"} <= {s.split()[0] for s in result.stderr.splitlines()}
    assert result.stderr.splitlines()[-1] == "4 rows done, 0 failed, 0 skipped"


def test_quiet_shows_nothing_but_errors(tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "one plus one equals"}\n')
    result = run(*base(source, out, "--quiet"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    source.write_text('{"prompt": "one plus one equals"}\n{"best_of": 2, "prompt": "a"}\n')
    result = run(*base(source, out, "--quiet", "--overwrite"))
    assert (result.exit_code, result.stderr) == (1, "1 row done, 1 failed, 0 skipped\n")
    result = run(*base(source, out, "--quiet"))
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
    result = run(*base(source, out, "--quiet", "--verbose"))
    error, hint = result.stderr.splitlines()
    assert result.exit_code == 2 and "exclude each other" in error and hint.startswith("hint: ")


@pytest.mark.parametrize("why", [None, "card X lacks what the kernels need"])
def test_plain_torch_on_a_gpu_gets_no_prediction_of_kernels(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str | None
) -> None:
    profile = tmp_path / "mine.toml"
    shipped = (resource_dir("profiles") / "cpu.toml").read_text()
    profile.write_text(shipped.replace('kind = "nominal"', 'kind = "measured"'))
    monkeypatch.setattr("dakrun.llm.why_plain_torch", lambda *_: why)
    result = run(*base(prompts, tmp_path / "out.jsonl", "--profile", profile))
    assert result.exit_code == 0, result.stderr
    said = f"runs on plain torch, slower than the kernels: {why}\n"
    assert (said in result.stderr) is (why is not None)
    assert ("for 4 requests" in result.stderr) is (why is None)
    if why is not None:
        assert "predicted " not in result.stderr


def test_text_file_in_rows_and_report_out(prompts: Path, tmp_path: Path) -> None:
    out, report_path = tmp_path / "out.jsonl", tmp_path / "report.json"
    result = run(
        *base(prompts, out, "--offload-ratio", 0.5, "--kv-offload-ratio", 0.5, "--batch-size", 2),
        "--report",
        report_path,
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "4 rows done, 0 failed, 0 skipped" in result.stderr
    for line, (a, b) in enumerate(SUMS, 1):
        row = rows(out)[f"line-{line}"]
        assert task.is_right(a, b, row["text"])
        assert row["finish_reason"] == "stop"
        assert row["usage"]["completion_tokens"] == len(row["token_ids"])
    report = json.loads(report_path.read_text())
    assert report["schema"] == 1
    assert report["rows"] == {"done": 4, "failed": 0, "skipped": 0, "failed_before": 0}
    assert report["requests"]["finished"] == 4
    tiers = {tier["name"]: tier for tier in report["tiers"]}
    assert tiers["host"]["kv_bytes"] == tiers["hbm"]["kv_bytes"] > 0
    total = tiers["host"]["weights_bytes"] + tiers["hbm"]["weights_bytes"]
    assert abs(tiers["host"]["weights_bytes"] / total - 0.5) < 0.05
    assert {op["name"] for op in report["ops"]} >= {"qkv", "attention", "lm_head"}


@pytest.mark.usefixtures("unfrozen")
def test_a_run_leaves_what_is_loaded_to_no_garbage_collection(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at all objects of all modules would take as long as several steps."""
    counts, launch = [], ReferenceRunner.launch

    def counted(runner: ReferenceRunner, step: Step) -> None:
        counts.append((gc.get_freeze_count(), len(gc.get_objects())))
        launch(runner, step)

    monkeypatch.setattr(ReferenceRunner, "launch", counted)
    assert run(*base(prompts, tmp_path / "out.jsonl")).exit_code == 0
    assert counts and all(frozen > others for frozen, others in counts)
    assert gc.get_freeze_count() == 0


def test_a_run_leaves_frozen_what_a_program_has_frozen(prompts: Path, tmp_path: Path) -> None:
    before = gc.get_freeze_count()
    assert before and run(*base(prompts, tmp_path / "out.jsonl")).exit_code == 0
    assert gc.get_freeze_count() > before // 2


@pytest.mark.usefixtures("unfrozen")
def test_an_interrupt_right_before_the_run_is_told(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While garbage is collected, for as long as there are objects to look at."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", interrupted)
        result = run(*base(prompts, tmp_path / "out.jsonl"))
    assert result.exit_code == 130
    assert re.match(r"interrupted: 0 of \d+ rows on disk in .*; to go on, run ", result.stderr)
    assert gc.get_freeze_count() == 0


def test_bad_rows_become_error_rows_and_exit_1(tmp_path: Path) -> None:
    source, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps({"id": "good", "prompt": task.prompt(2, 3)}),
        "{not json",
        json.dumps({"id": "long", "prompt": "one " * 200}),
        json.dumps({"id": "ids", "prompt_token_ids": [1, 3, 4], "max_tokens": 2}),
        json.dumps({"id": "odd", "prompt": "one", "best_of": 3}),
    ]
    source.write_text("\n".join(lines), encoding="utf-8")
    result = run(*base(source, out))
    assert result.exit_code == 1
    assert "2 rows done, 3 failed" in result.stderr
    found = rows(out)
    assert task.is_right(2, 3, found["good"]["text"])
    assert found["line-2"]["error"]["code"] == "invalid_json"
    assert found["line-2"]["error"]["line"] == 2
    assert found["long"]["error"]["code"] == "prompt_too_long"
    assert "best_of" in found["odd"]["error"]["message"]
    assert len(found["ids"]["token_ids"]) <= 2


def test_error_rows_count_in_resumed_runs_too(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"id":"line-2","error":{"code":"c"}}\n{"id":"gone","error":{"code":"c"}}\n')
    for done, skipped in ((3, 1), (0, 4)):
        result = run(*base(prompts, out, "--resume"))
        assert result.exit_code == 1
        last = f"{done} rows done, 0 failed, {skipped} skipped; 2 failed before, "
        last += "which --retry-failed runs again"
        assert result.stderr.splitlines()[-1] == last
    assert len(rows(out)) == 5


def test_openai_batch_rows_in_and_out(tmp_path: Path) -> None:
    source, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    rows = [
        {
            "custom_id": f"{a}+{b}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "demo", "prompt": task.prompt(a, b)},
        }
        for a, b in SUMS
    ]
    rows[3]["url"] = "/v1/embeddings"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run(*base(source, out)).exit_code == 1
    whole = sorted(out.read_text().splitlines(keepends=True))
    found = {row["custom_id"]: row for row in map(json.loads, whole)}
    for a, b in SUMS[:3]:
        body = found[f"{a}+{b}"]["response"]["body"]
        assert task.is_right(a, b, body["choices"][0]["text"])
        assert body["usage"]["total_tokens"] == sum(
            body["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion")
        )
    assert found["20+30"]["error"]["code"] == "unsupported_url"
    out.write_text("".join(whole[:2]))
    result = run(*base(source, out, "--resume"))
    assert "2 skipped" in result.stderr
    ids = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert sorted(ids) == sorted(found)


def test_choices_of_a_row(tmp_path: Path) -> None:
    """Greedy ones are equal, sampled ones are not; the first is what n = 1 gives. Resume has rows.

    A row with several choices is one row in the counts, and is written when it has all of them.
    """
    source, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    prompts = [task.prompt(47, 85), task.prompt(3, 4)]

    def answers(n: int, *options: object) -> dict[str, list[str]]:
        bodies = {
            "greedy": {"prompt": prompts, "n": n},
            "sampled": {"prompt": prompts, "n": n, "temperature": 3, "ignore_eos": True},
            "one": {"prompt": prompts[0]},
        }
        batch = {"method": "POST", "url": "/v1/completions"}
        lines = [json.dumps({"custom_id": id, **batch, "body": b}) for id, b in bodies.items()]
        source.write_text("\n".join(lines))
        result = run(*base(source, out, "--max-tokens", 6, "--batch-size", 3, *options))
        assert result.exit_code == 0, result.stderr
        skipped = int("--resume" in options)
        assert f"{3 - skipped} rows done, 0 failed, {skipped} skipped" in result.stderr
        found = {row["custom_id"]: row["response"]["body"] for row in read_lines(out)}
        assert len(found) == len(out.read_text().splitlines()) == 3
        for body in found.values():
            assert [c["index"] for c in body["choices"]] == list(range(len(body["choices"])))
        greedy, sampled = (found[id]["usage"]["prompt_tokens"] for id in ("greedy", "sampled"))
        assert greedy == sampled
        return {id: [c["text"] for c in body["choices"]] for id, body in found.items()}

    single, triple = answers(1), answers(3, "--overwrite")
    assert single["greedy"][0] == single["one"][0] and task.is_right(3, 4, single["greedy"][1])
    assert triple["greedy"] == [text for text in single["greedy"] for _ in range(3)]
    assert len(set(triple["sampled"])) == 6 and triple["sampled"][::3] == single["sampled"]
    kept = [line for line in out.read_text().splitlines(keepends=True) if '"sampled"' not in line]
    out.write_text(kept[0] + kept[1][:50])
    assert answers(3, "--resume") == triple


def test_chat_rows_go_through_the_chat_template(tmp_path: Path) -> None:
    model, out = shutil.copytree(MODEL, tmp_path / "chat"), tmp_path / "out.jsonl"
    template = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}{% endif %}"
    )
    messages = [
        {"role": "system", "content": "forty seven"},
        {"role": "user", "content": [{"type": "text", "text": "plus eighty five equals"}]},
    ]
    body = {"model": "sums", "messages": messages, "max_completion_tokens": 8}
    row = {"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": body}
    result = run(*base("-", out, model=model), stdin=json.dumps(row))
    assert result.exit_code == 0, result.output
    answer = json.loads(out.read_text())["response"]["body"]
    assert answer["object"] == "chat.completion" and answer["model"] == "sums"
    assert task.is_right(47, 85, answer["choices"][0]["message"]["content"])


def test_stdin_to_stdout(prompts: Path) -> None:
    result = run(*base("-", "-"), stdin=prompts.read_text())
    assert result.exit_code == 0, result.stderr
    texts = {row["id"]: row["text"] for row in map(json.loads, result.stdout.splitlines())}
    assert task.is_right(*SUMS[0], texts["line-1"])
    assert len(texts) == 4


def test_stop_strings_and_max_tokens(tmp_path: Path) -> None:
    source, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompt = task.prompt(90, 33)
    source.write_text(
        "\n".join(
            [
                json.dumps({"id": "stop", "prompt": prompt, "stop": " twenty"}),
                json.dumps({"id": "two", "prompt": prompt, "max_tokens": 2}),
            ]
        )
    )
    assert run(*base(source, out)).exit_code == 0
    assert rows(out)["stop"]["text"] == "one hundred"
    assert rows(out)["stop"]["finish_reason"] == "stop"
    assert rows(out)["two"]["text"] == "one hundred"
    assert rows(out)["two"]["finish_reason"] == "length"


def test_max_tokens_beyond_the_model_are_capped_and_counted(tmp_path: Path) -> None:
    source, out, report = tmp_path / "p.jsonl", tmp_path / "out.jsonl", tmp_path / "report.json"
    row = {"prompt_token_ids": [1, 5, 6], "ignore_eos": True}
    lines = [{**row, "max_tokens": count} for count in (29, 30, 10**6)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(*base(source, out, "--max-model-len", 32, "--report", report))
    assert result.exit_code == 0, result.stderr
    assert [len(row["token_ids"]) for row in rows(out).values()] == [29, 29, 29]
    assert "; 2 capped at 32 tokens, the maximum length" in " ".join(result.stderr.split())
    assert json.loads(report.read_text())["requests"]["capped"] == 2


def test_sampling_depends_on_the_seed_alone(prompts: Path, tmp_path: Path) -> None:
    def sample(name: str, *options: object) -> dict[str, Any]:
        out = tmp_path / f"{name}.jsonl"
        more = ("--temperature", 2.0, "--max-tokens", 6, "--ignore-eos", *options)
        assert run(*base(prompts, out, *more)).exit_code == 0
        return {id: row["token_ids"] for id, row in rows(out).items()}

    first = sample("a", "--seed", 5, "--batch-size", 4)
    assert sample("b", "--seed", 5, "--batch-size", 1) == first
    assert sample("c", "--seed", 6, "--batch-size", 4) != first


def test_an_existing_output_is_kept_resumed_or_replaced(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(*base(prompts, out)).exit_code == 0
    whole = out.read_text()
    result = run(*base(prompts, out))
    assert result.exit_code == 2
    assert "--resume" in result.stderr and out.read_text() == whole
    out.write_text("".join(whole.splitlines(keepends=True)[:2]) + '{"id":"line-9')
    result = run(*base(prompts, out, "--resume"))
    assert result.exit_code == 0 and "2 rows done, 0 failed, 2 skipped" in result.stderr
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    assert run(*base(prompts, out, "--overwrite")).exit_code == 0
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())


def test_the_plan_is_made_for_the_lengths_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, report = [], LLM.report

    def noted(llm: LLM, wall_s: float) -> dict[str, Any]:
        plans.append(llm.plan)
        return report(llm, wall_s)

    monkeypatch.setattr(LLM, "report", noted)
    source = tmp_path / "p.jsonl"
    lengths = [(3, 2), (5, 4), (7, 9)]
    rows = [{"prompt_token_ids": [5] * p, "max_tokens": n, "ignore_eos": True} for p, n in lengths]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(*base(source, tmp_path / "out.jsonl", "--max-tokens", 50))
    assert result.exit_code == 0, result.stderr
    workload = plans[0].workload
    assert (workload.prompt_len, workload.new_tokens) == (5, 5)
    assert workload.batch_size <= 3


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("", "'' is not a file name"),
        ("-", "'-' is not a file name"),
        (".", "is a directory"),
        ("none/report.json", "none: no such folder"),
        ("dangling", "none: no such folder"),
        ("out.jsonl", "overwrite the results"),
        ("link to out", "overwrite the results"),
        ("prompts.txt", "overwrite the prompts"),
        ("hard link", "overwrite the prompts"),
    ],
)
def test_reports_that_would_destroy_a_file_or_go_nowhere(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("none/report.json")
    Path("link to out").symlink_to("out.jsonl")
    Path("hard link").hardlink_to(prompts)
    before = prompts.read_text()
    result = run(*base("prompts.txt", "out.jsonl", "--report", report))
    assert result.exit_code == 2 and not Path("out.jsonl").exists()
    error, hint = result.stderr.splitlines()
    assert message in error and "--report" in hint
    assert prompts.read_text() == before


def test_a_report_is_not_the_profile(prompts: Path, tmp_path: Path) -> None:
    profile = shutil.copy(resource_dir("profiles") / "cpu.toml", tmp_path / "mine.toml")
    before = Path(profile).read_text()
    result = run(*base(prompts, tmp_path / "out.jsonl", "--profile", profile, "--report", profile))
    assert result.exit_code == 2 and "overwrite the profile" in result.stderr
    assert Path(profile).read_text() == before


def test_a_report_is_not_a_redirected_input_or_output(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for source, output, report in ((prompts, "-", out), ("-", tmp_path / "rows.jsonl", prompts)):
        command = [sys.executable, "-m", "dakrun", "generate"]
        arguments = map(str, base(source, output, "--report", report))
        with prompts.open() as stdin, out.open("w") as stdout:
            run = subprocess.run(
                [*command, *arguments], stdin=stdin, stdout=stdout, stderr=subprocess.PIPE
            )
        assert run.returncode == 2 and b"the report would overwrite" in run.stderr


def without_tokenizer(tmp_path: Path) -> Path:
    model = shutil.copytree(MODEL, tmp_path / "bare")
    (model / "tokenizer.json").unlink()
    return model


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    source, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    source.write_text('{bad\n{"prompt_token_ids": [1, 5, 6]}\n{"prompt": "text"}\n')
    result = run(*base(source, out, model=without_tokenizer(tmp_path)))
    assert result.exit_code == 1
    assert rows(out)["line-1"]["error"]["code"] == "invalid_json"
    assert rows(out)["line-2"]["text"] is None
    assert rows(out)["line-3"]["error"]["code"] == "no_tokenizer"


def test_the_console_script_and_its_progress_stay_off_stdout(prompts: Path) -> None:
    command = [sys.executable, "-m", "dakrun", "generate"]
    arguments = map(str, base(prompts, "-", "--max-tokens", 3))
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 4
    assert "\x1b" not in done.stderr


def test_talk_that_cannot_be_written_is_no_failure(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = map(str, base(prompts, out, "--max-tokens", 1))
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-m", "dakrun", "generate", *arguments], stderr=full)
    assert run.returncode == 0 and len(rows(out)) == 4


def test_demo_answers_at_least_95_percent() -> None:
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    assert int(result.stdout.split(" of 200 sums are right")[0].split()[-1]) >= 190
    assert "TPOT" in result.stdout


def test_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"id": "a", "prompt_token_ids": [5, 6, 7]}\n', encoding="utf-8")
    options = ("--load-format", "dummy", "--max-tokens", 4, "--ignore-eos")
    result = run(*base(prompts, out, *options, model=tmp_path))
    assert result.exit_code == 0, result.stderr
    assert len(rows(out)["a"]["token_ids"]) == 4 and "with random weights" in result.stderr


def test_a_known_name_has_random_weights_but_no_tokenizer(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run(*base(prompts, out, "--load-format", "dummy", model=Path("opt-125m")))
    assert result.exit_code == 2
    assert "has no tokenizer" in result.stderr and "prompt_token_ids" in result.stderr
