"""A whole run of many short rows, good and bad, with too few KV blocks, cut off and resumed."""

import gc
import json
import math
import random
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from teacher_forced import gap_of
from transformers import AutoModelForCausalLM, LlamaConfig

from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.demo.task import VOCABULARY
from dakrun.engine import Admission
from dakrun.generate import BatchJob
from dakrun.llm import LLM
from dakrun.plan import Plan, Policy
from dakrun.requests import Completion, Request, RequestReader, ResultWriter, RowError

COUNT, MAX_LEN, LIMITS = 600, 96, SamplingParams(max_tokens=8)
FEW_BLOCKS = (("hbm", 8, 5), ("host", 8, 5))  # slots and blocks, of which a request takes up to two
BAD = {
    "prompt_too_long": {"id": "long", "prompt_token_ids": [5] * MAX_LEN},
    "duplicate_id": {"id": "r7", "prompt": "one plus"},
    "invalid_prompt": {"id": "empty", "prompt_token_ids": []},
    "unsupported_field": {"id": "field", "prompt": "one", "maxtokens": 3},
    "invalid_field": {"id": "none", "prompt": "one", "max_tokens": 0},
    "mixed_formats": {"custom_id": "batch", "url": "/v1/completions", "body": {"prompt": "one"}},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 channels with random weights and the demo's words."""
    folder = tmp_path_factory.mktemp("soak")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


def good_rows(count: int = COUNT) -> list[dict[str, Any]]:
    """Text and token ids of 1 to 60 tokens, greedy and sampled, some with stop words."""
    chance, rows = random.Random(COUNT), []
    for i in range(count):
        row: dict[str, Any] = {"id": f"r{i}", "max_tokens": chance.randint(1, 24)}
        length = chance.randint(1, 60)
        if i % 2:
            row["prompt"] = " ".join(chance.choices(VOCABULARY, k=length - 1))
        else:
            row["prompt_token_ids"] = chance.choices(range(3, 64), k=length)
        if i % 3 == 0:
            row |= {"temperature": 0.9, "seed": i, "top_k": i % 4}
        if i % 10 == 0:
            row |= {"stop": chance.choice(VOCABULARY), "logprobs": i % 4}
        rows.append(row)
    return rows


def load(path: Path, batch_size: int, speculate: str = "off") -> LLM:
    return LLM(
        path, device="cpu", batch_size=batch_size, max_model_len=MAX_LEN, speculate=speculate,
        policy=Policy(offload_ratio=0.3, kv_offload_ratio=0.5),
    )  # fmt: skip


def complete(path: Path, source: Path, out: Path, requests: int) -> tuple[int, int]:
    """Resume `out` until that many more requests are done.

    Returns how often one preempted, and the bytes that were then held beside the loaded model.
    """
    with load(path, 16) as llm:
        cache, run = llm.engine.runner.cache, llm.run

        def cut_off(rows: Iterable[Request | None], **how: Any) -> Iterator[Completion | RowError]:
            with closing(run(rows, **how)) as results:  # type: ignore[type-var]
                yield from islice(results, requests)

        llm.run = cut_off  # type: ignore[method-assign]
        assert cache.blocks == (5, 5)
        tracemalloc.start()
        with (
            RequestReader(source, defaults=LIMITS) as reader,
            ResultWriter(out, resume=True) as writer,
            BatchJob(llm, reader, writer, None) as job,
        ):
            job.run()
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))
        return llm.engine.stats.preempted, held


@pytest.mark.full
def test_many_rows_cut_off_and_resumed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each id once, errors where they belong, the blocks back, no memory for rows that are done.

    After the cut requests begin without regard to the blocks that others will need, so that many
    restart. Tokens are those of each request alone.
    """
    monkeypatch.setattr("os.fsync", lambda _: None)  # test_survival.py needs it; here it only waits
    good, source, out = good_rows(), tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(row).encode() for row in good]
    for number, row in enumerate(BAD.values()):
        lines.insert(100 * number + 90, json.dumps(row).encode())
    lines[300:300] = [b"{", b"", b'{"id": "\xff"}']
    source.write_bytes(b"\n".join(lines) + b"\n")

    with monkeypatch.context() as few:
        few.setattr(Plan, "kv_placement", lambda _: FEW_BLOCKS)
        complete(path, source, out, COUNT // 2)
        out.write_bytes(out.read_bytes()[:-30])
        few.setattr(Admission, "_has_room", lambda *_: True)
        preempted, held = complete(path, source, out, COUNT - COUNT // 2 + 1)
    assert preempted > 10
    assert held < 150_000, "250 bytes a row would be too much; 110,000 to 125,000 are caches"

    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {row["id"]: row for row in rows}
    failed = {id: row["error"]["code"] for id, row in found.items() if "error" in row}
    assert len(rows) == len(found) == COUNT + len(failed)
    assert found.keys() - failed.keys() == {row["id"] for row in good}
    assert Counter(failed.values()) == Counter([*BAD, "invalid_json", "invalid_utf8"])

    some = tmp_path / "some.jsonl"
    some.write_text("".join(json.dumps(row) + "\n" for row in good[::8]))
    with load(path, 1) as llm, RequestReader(some, defaults=LIMITS) as reader:
        for alone in llm.stream(r for r in reader.rows(llm.rules) if not isinstance(r, RowError)):
            assert not isinstance(alone, RowError)
            assert found[alone.id]["token_ids"] == list(alone.token_ids)
            assert found[alone.id]["text"] == alone.text


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.full)])
def test_drafts_with_a_tenth_of_the_blocks(
    path: Path, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 slots, whose requests take up to 80 blocks: the tokens of each request alone.

    Two scores may be equal but for the order of float32 sums, which follows from the rows beside.
    """
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in good_rows(count)))

    def run(llm: LLM) -> dict[str, Completion]:
        with RequestReader(source, defaults=LIMITS) as reader:
            rows = (row for row in reader.rows(llm.rules) if not isinstance(row, RowError))
            found = {one.id: one for one in llm.stream(rows) if isinstance(one, Completion)}
        cache = llm.engine.runner.cache
        assert all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))
        return found

    with load(path, 1) as llm:
        wanted = run(llm)
    assert len(wanted) == count
    with monkeypatch.context() as few:
        few.setattr(Plan, "kv_placement", lambda _: (("hbm", 20, 4), ("host", 20, 4)))
        few.setattr(Admission, "_has_room", lambda *_: True)
        with load(path, 40, "suffix:5") as llm:
            found, stats = run(llm), llm.engine.stats
            with RequestReader(source, defaults=LIMITS) as reader:
                requests = [r for r in reader.rows(llm.rules) if isinstance(r, Request)]
    assert found.keys() == wanted.keys()
    differ = [r for r in requests if found[r.id].token_ids != wanted[r.id].token_ids]
    assert all(
        (one.text, one.finish_reason) == (wanted[id].text, wanted[id].finish_reason)
        for id, one in found.items() if one.token_ids == wanted[id].token_ids
    )  # fmt: skip
    assert len(differ) <= count / 1000
    with load(path, 1) as llm:
        for request in differ:
            params = replace(request.params, logprobs=20)
            (again,) = llm.stream([replace(request, params=params)])
            assert isinstance(again, Completion)
            other = found[request.id].token_ids
            pairs = zip(again.token_ids, other, strict=False)
            place = next(i for i, (a, b) in enumerate(pairs) if a != b)
            assert gap_of(request, again, place, (other[place], -math.inf)) < 1e-5
    assert stats.preempted > count / 10 and sum(stats.accepted_drafts.values()) > count / 10
