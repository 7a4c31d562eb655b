"""A GPU that cannot run the kernels says so, and why."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cards import properties

from dakrun.config import Workload
from dakrun.engine.build import why_plain_torch
from dakrun.hardware import load_profile
from dakrun.kernels.runtime import has_kernels
from dakrun.models.known import known_model
from dakrun.plan import Policy, make_plan


@pytest.mark.parametrize(
    ("major", "shared_kib", "runs"), [(9, 228, True), (12, 100, True), (12, 64, False)]
)
def test_a_card_with_little_shared_memory_falls_back_and_is_named(
    monkeypatch: pytest.MonkeyPatch, major: int, shared_kib: int, runs: bool
) -> None:
    card = properties(f"{major}.0", shared_kib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card.name)
    model = known_model("opt-6.7b")
    assert model is not None
    workload = Workload(batch_size=8, prompt_len=64, new_tokens=32, max_model_len=128)
    plan = make_plan(model, workload, load_profile("h100-sxm"), Policy())
    gpu = torch.device("cuda", 0)
    assert has_kernels(gpu) is runs
    reason = why_plain_torch(plan, gpu)
    assert reason is None if runs else reason is not None and "a card lacks" in reason
    assert why_plain_torch(plan, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"ffn_size": 11004}, "down, a matrix of 11004 columns in float16"),
        ({"dtype": "float32"}, "embedding, a matrix of 4096 columns in float32"),
        (
            {"head_dim": 72},
            "attention, 32 query heads and 8 KV heads of 72 elements in float16",
        ),
    ],
)
def test_what_has_no_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], why: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties("9.0", 228))
    known = known_model("llama-3-8b")
    assert known is not None
    model = replace(known, **({"dtype": "float16"} | changed))
    workload = Workload(batch_size=8, prompt_len=64, new_tokens=32, max_model_len=128)
    plan = make_plan(model, workload, load_profile("h100-sxm"), Policy())
    found = why_plain_torch(plan, torch.device("cuda", 0))
    assert found == (why and f"there are no kernels for {model.name}'s {why}")
