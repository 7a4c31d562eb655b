"""`dakrun bench --rival`: its model has the same architecture, its steps follow."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny_models
import torch

from dakrun.config import ModelConfig
from dakrun.lab.rivals.architecture import meta_model, transformers_config, weight_bytes
from dakrun.lab.rivals.steps import RivalStep, Step, rival_step
from dakrun.models import known_model, known_names, parse_model_config
from dakrun.models.known_quantized import QUANTIZED

NAMES = [name for name in known_names() if name not in QUANTIZED]
TINY = tuple(tiny_models.CONFIGS)


def tiny(name: str) -> ModelConfig:
    return parse_model_config(tiny_models.CONFIGS[name].to_dict(), name=name)


@pytest.mark.parametrize("name", [*NAMES, *TINY])
def test_the_architecture_is_the_same(name: str) -> None:
    config = known_model(name) or tiny(name)
    found = parse_model_config(transformers_config(config).to_dict(), name=name)
    assert found == replace(config, limited_by="")


@pytest.mark.parametrize("name", TINY)
@torch.inference_mode()
def test_steps(name: str) -> None:
    model = tiny_models.reference(name)
    prompt = torch.randint(tiny_models.VOCAB, (3, 7), generator=torch.manual_seed(1))
    step, text = Step(model, prompt, 12), prompt
    for _ in range(4):
        following = model(text).logits[:, -1].argmax(-1, keepdim=True)
        assert torch.equal(step.token, following)
        text = torch.cat([text, following], dim=1)
        step()


@pytest.mark.parametrize(("by", "new_tokens"), [("uva", 3), ("prefetch", 32)])
def test_the_median_of_all_steps(by: str, new_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(launch: Callable[[], None], runs: int) -> list[float]:
        for _ in range(3 * runs + 2):
            launch()
        return [0.1, 0.3, 0.2]

    monkeypatch.setattr("dakrun.lab.rivals.steps.graph_seconds", seconds)  # needs a GPU
    config = replace(tiny("llama-gqa3-tied"), dtype="bfloat16")
    device = torch.device("cpu")
    sizes = {"batch_size": 2, "prompt_len": 5, "new_tokens": new_tokens}
    total = weight_bytes(meta_model(config))
    resident = rival_step("transformers", config, **sizes, device=device)
    assert resident == RivalStep(0.2, 0.0, total)
    found = rival_step(by, config, ratio=0.5, **sizes, device=device)
    assert found.seconds == 0.2 and 0.5 <= found.ratio < 1


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["opt-like-125m", "llama-gqa3-tied"])
@pytest.mark.parametrize(("by", "ratio"), [("prefetch", 0.0), ("prefetch", 0.5), ("uva", 0.5)])
def test_a_time_on_a_gpu(name: str, by: str, ratio: float) -> None:
    config = replace(tiny(name), dtype="float16")
    device = torch.device("cuda", 0)
    found = rival_step(
        by, config, ratio=ratio, batch_size=2, prompt_len=8, new_tokens=9, device=device
    )
    assert 0 < found.seconds < 1 and found.ratio >= ratio
