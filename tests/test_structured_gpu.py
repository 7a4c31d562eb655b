"""Answers of a given form on the GPU's kernels, which wait for masks that a thread writes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_engine_gpu import CONFIGS
from tiny_models import damage, save_half
from tiny_tokenizer import make_tokenizer_files

from dakrun import LLM, SamplingParams
from dakrun.engine import Admission, SwapSpace
from dakrun.errors import CannotRun
from dakrun.plan import Policy

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first tokens are those of a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("forms")
    made = save_half(CONFIGS["llama-gqa"], folder / "model")
    tokenizer = make_tokenizer_files(folder / "tokenizer")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, made / name)
    return made


def load(path: Path, batch_size: int, **policy: Any) -> LLM:
    return LLM(
        path, device="cuda", batch_size=batch_size, max_model_len=320, expected_tokens=60,
        policy=Policy(**policy),
    )  # fmt: skip


def rows(count: int, every: int = 2) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters; `every` so many rows one has no form."""
    prompts = [[5 + i % 90] * (i * 37 % 150 + 1) for i in range(count)]
    params = [
        SamplingParams(
            max_tokens=70, temperature=i % 3 / 2, seed=i, ignore_eos=True,
            logprobs=1 if i % 5 == 0 else None,
            min_tokens=60 if i % 7 == 0 else 0,
            structured_outputs={"regex": form(i)} if i % every else None,
        )
        for i in range(count)
    ]  # fmt: skip
    return prompts, params


def form(i: int) -> str:
    return f"([a-{'cdefg'[i % 5]}]{{2,5}},){{{2 + i % 9}}}"


def check(found: list[Any], every: int = 2) -> None:
    for i, one in enumerate(found):
        if i % every:
            assert one.valid and one.finish_reason == "stop" and re.fullmatch(form(i), one.text)
        else:
            assert one.valid is None and len(one.token_ids) == 70


def test_guided_rows_keep_their_forms_beside_others(path: Path) -> None:
    given = rows(60)
    with load(path, 8) as llm:
        found = llm.generate(*given)
        check(found)
        assert [one.token_ids for one in llm.generate(*given)] == [one.token_ids for one in found]
        assert llm.report()["requests"]["valid"] == 60
    with load(path, 8, offload_ratio=0.4, kv_offload_ratio=0.5) as llm:
        check(llm.generate(*given))
    with load(path, 60) as llm:
        check(llm.generate(*given, progress=False))


def test_they_go_on_after_they_gave_up_their_slots(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
    with load(path, 8) as llm:
        llm.engine.preemption.swap = SwapSpace(llm.engine.runner.cache, 8)
        llm.engine.preemption.swap.open()
        llm.engine.preemption.swap.wait()
        check(llm.generate(*rows(60)))


def test_a_run_that_is_left_holds_nothing_up(path: Path) -> None:
    prompts, params = rows(20, every=3)
    with load(path, 8) as llm:
        for _ in range(3):
            stream = llm.stream(prompts, params)
            next(stream)
            stream.close()
        check(llm.generate(prompts, params), every=3)
        next(llm.stream(prompts, params))


def test_logits_that_are_not_finite_end_a_guided_row(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    damage(broken, "model.embed_tokens.weight", (9, 3))
    params = SamplingParams(max_tokens=40, structured_outputs={"regex": "[a-c]{20}"})
    with load(broken, 4) as llm:
        for _ in range(5):
            with pytest.raises(CannotRun, match="NaN or infinite"):
                llm.generate([[50, 60], [9, 9], [70], [80]], params)
        assert all(one.valid for one in llm.generate([[50, 60], [70], [80]], params))
