"""`dakrun bench --rival on-demand`: experts copied once they are chosen."""

from dataclasses import replace

import pytest
import tiny_models
import torch

from dakrun.config import ModelConfig, Popularity
from dakrun.errors import UsageError
from dakrun.lab.rivals.architecture import decoder_layers, meta_model
from dakrun.lab.rivals.on_demand import BUFFERS, Buffers, OnDemandExperts, Sizes, built, drawn
from dakrun.lab.rivals.steps import Step, rival_step
from dakrun.models import parse_model_config
from dakrun.models.popularity import with_popularity

CPU = torch.device("cpu")
MIXTURES = [name for name, of in tiny_models.CONFIGS.items() if hasattr(of, "num_experts_per_tok")]


def tiny(name: str) -> ModelConfig:
    return parse_model_config(tiny_models.CONFIGS[name].to_dict(), name=name)


def layer(remote: frozenset[int], choices: torch.Tensor | None = None) -> OnDemandExperts:
    """Seven experts; buffers hold NaN until experts are copied there."""
    sizes, generator = Sizes(16, 6), torch.Generator().manual_seed(2)
    experts = list(torch.randn(7, sizes.elements, generator=generator))
    rooms = [torch.full((sizes.elements,), torch.nan) for _ in range(BUFFERS)]
    return OnDemandExperts(sizes, experts, remote, Buffers(rooms), choices)


@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.inference_mode()
def test_results_do_not_depend_on_where_experts_lie(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator)
    index = torch.rand(rows, 7, generator=generator).topk(3).indices
    weights = torch.rand(rows, 3, generator=generator)
    whole, some, none = (layer(frozenset(of)) for of in ((), (0, 3, 4), range(7)))
    found = [each(x, index, weights) for each in (whole, some, none)]
    expected = torch.zeros(rows, 16)
    for row in range(rows):
        for number, weight in zip(index[row].tolist(), weights[row], strict=True):
            gate_up, down = Sizes(16, 6).views(whole._experts[number])
            gate, up = (gate_up @ x[row]).chunk(2)
            expected[row] += weight * (down @ (gate * gate.sigmoid() * up))
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)
    distinct = index.unique()
    assert (whole.copied, none.copied) == (0, len(distinct))
    assert some.copied == sum(int(n) in (0, 3, 4) for n in distinct)


def test_drawn_choices_follow_the_popularity() -> None:
    wanted = Popularity.zipf(2, 24, 4, 1.0)
    found = drawn(wanted, 1, 40, 4)
    assert all(len(set(of)) == 4 for of in found.flatten(0, 1).tolist())
    chances = found.flatten().bincount(minlength=24)[list(wanted.orders[1])] / (64 * 40)
    assert (chances - torch.tensor(wanted.chances(4, 1))).abs().max() < 0.05


@pytest.mark.parametrize("ratio", [0.2, 1.0])
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_whole_models(name: str, ratio: float) -> None:
    config = with_popularity(tiny(name), "zipf:1.0", random=True)
    with built(meta_model(config), config, ratio, CPU, 2) as (model, found):
        step = Step(model, torch.randint(tiny_models.VOCAB, (2, 5)), 16)
        layers = [of.mlp.experts for of in decoder_layers(model) if hasattr(of.mlp, "experts")]
        before = [of.copied for of in layers]
        step()
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert config.mixture is not None
        experts, top_k = config.mixture.routing.experts, config.mixture.routing.top_k
        copied = [of.copied - n for of, n in zip(layers, before, strict=True)]
        assert len(layers) == config.num_layers - len(config.mixture.dense_layers)
        if ratio == 1.0:
            assert all(top_k <= n <= min(experts, 2 * top_k) for n in copied)
        assert 0.2 <= found < 1 and (found >= ratio or ratio == 1.0)


def test_the_time_of_its_steps() -> None:
    config = replace(tiny("mixtral"), dtype="bfloat16")
    found = rival_step(
        "on-demand",
        config,
        ratio=0.4,
        batch_size=2,
        prompt_len=5,
        new_tokens=8,
        device=CPU,
    )
    assert 0 < found.seconds < 60 and found.ratio >= 0.4


def test_it_is_for_mixtures() -> None:
    from test_bench_model import sweep

    assert sweep(model="qwen3-30b-a3b", rival="on-demand").rival == "on-demand"
    with pytest.raises(
        UsageError, match=r"on-demand is for mixtures of experts; opt-6.7b has none"
    ):
        sweep(rival="on-demand")


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0.1, 0.3])
@torch.inference_mode()
def test_on_a_gpu_copies_arrive_before_their_products(ratio: float) -> None:
    """The same choices give the same results as with the experts in HBM, step after step."""
    device = torch.device("cuda", 0)
    sizes, generator = Sizes(256, 192), torch.Generator().manual_seed(2)
    whole = torch.randn(24, sizes.elements, generator=generator).mul_(0.05).half()
    x = torch.randn(8, 256, generator=generator).half().to(device)
    weights = torch.rand(8, 6, generator=generator).half().to(device)
    remote = frozenset(range(24 - int(24 * 3 * ratio), 24))
    experts = [
        of.pin_memory() if number in remote else of.to(device) for number, of in enumerate(whole)
    ]
    rooms = [torch.full((sizes.elements,), torch.nan).half().to(device) for _ in range(BUFFERS)]
    here = OnDemandExperts(sizes, list(whole.to(device)), frozenset(), Buffers(rooms))
    there = OnDemandExperts(sizes, experts, remote, Buffers(rooms))
    for step in range(50):
        index = torch.rand(8, 24, generator=generator.manual_seed(step)).topk(6).indices.to(device)
        torch.testing.assert_close(there(x, index, weights), here(x, index, weights))
    assert there.copied > 0
