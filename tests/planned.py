"""Helpers of the planner's tests: a machine, well-known models and workloads."""

from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.hardware import load_profile
from dakrun.models import known_model

# GH200 with host memory as fast as NVLink-C2C, and with costs of few rows alone, so that thresholds
# follow from rates.
_SHIPPED = load_profile("gh200")
GH200 = replace(
    _SHIPPED,
    remote=tuple(replace(tier, group="") for tier in _SHIPPED.remote),
    link_groups={},
    many_rows=None,
)
GIB = 2**30


def known(name: str) -> ModelConfig:
    """The well-known model of that name."""
    model = known_model(name)
    assert model is not None
    return model


def work(batch_size: int, prompt_len: int = 32, new_tokens: int = 32) -> Workload:
    """A workload whose slots hold exactly a prompt and its new tokens."""
    return Workload(
        batch_size=batch_size,
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        max_model_len=prompt_len + new_tokens,
    )
