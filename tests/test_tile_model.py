"""Widened checkpoints answer as the small ones they are made of."""

from pathlib import Path

import pytest
import torch
import transformers
from tools.tile_model import tile_model

from dakrun import LLM, SamplingParams
from dakrun.demo import MODEL

PROMPTS = ["seven plus eighteen equals", "ten plus eleven equals"]


def test_logits_differ_by_the_order_of_summation(tmp_path: Path) -> None:
    tile_model(MODEL, tmp_path / "wide", 2)
    small, wide = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (MODEL, tmp_path / "wide")
    )
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, small(ids).logits, atol=1e-4, rtol=1e-4)
    assert wide.config.hidden_size == 2 * small.config.hidden_size


def test_answers_are_the_same(tmp_path: Path) -> None:
    tile_model(MODEL, tmp_path / "wide", 2)
    texts = []
    for path in (MODEL, tmp_path / "wide"):
        with LLM(path, dtype="float32", device="cpu", batch_size=2) as llm:
            done = llm.generate(PROMPTS, SamplingParams(max_tokens=8, stop="\n"))
            texts.append([completion.text for completion in done])
    assert texts[0] == texts[1] and any(texts[0])


def test_only_powers_of_two(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="power of two"):
        tile_model(MODEL, tmp_path / "wide", 3)
