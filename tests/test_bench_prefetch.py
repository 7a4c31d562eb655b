"""Layers of rivals in host memory: which they are, when prefetch copies them, and that the model
computes what it computes with everything in HBM, also where uva reads them in place.
"""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dakrun.config import ModelConfig
from dakrun.errors import CannotRun
from dakrun.lab.chain import recorded
from dakrun.lab.rivals.architecture import decoder_layers, meta_model
from dakrun.lab.rivals.host_layers import HostLayers, Prefetch, built, offloaded, spread
from dakrun.lab.rivals.steps import Step
from dakrun.memory.tiers import allocate_tiers
from dakrun.models import known_model, parse_model_config

CPU = torch.device("cpu")
LAYERS = 7


def known(name: str) -> ModelConfig:
    config = known_model(name)
    assert config is not None
    return config


def test_what_is_offloaded() -> None:
    model = meta_model(known("opt-6.7b"))
    found = {ratio: offloaded(model, ratio) for ratio in (0.0, 1e-6, 0.03, 0.48, 0.5, 0.9, 1.0)}
    assert found == {0.0: 0, 1e-6: 1, 0.03: 1, 0.48: 16, 0.5: 17, 0.9: 30, 1.0: 32}
    assert Prefetch.tier_bytes(model, 16) == {"hbm": 2 * 402_759_680, "host": 16 * 402_759_680}
    assert HostLayers.tier_bytes(model, 16) == {"host": 16 * 402_759_680}
    assert spread(16, 32) == list(range(1, 32, 2))
    assert spread(3, 32) == [10, 21, 31] and spread(1, 32) == [31] and spread(4, 4) == [0, 1, 2, 3]


def test_what_transformers_cannot_build() -> None:
    config = replace(known("llama-3-8b"), name="odd", hidden_size=4100, head_dim=128)
    with pytest.raises(CannotRun, match=r"cannot build odd: .*\(4100\) is not a multiple") as error:
        meta_model(config)
    assert "\n" not in str(error.value) and error.value.hint


class Clock:
    """The time of a stream: when what was launched on it ends."""

    time = 0.0

    def wait_event(self, time: float) -> None:
        self.time = max(self.time, time)


class Layers(torch.nn.Module):
    """A model whose layers take 1 each on the stream `main`."""

    def __init__(self, main: Clock, count: int) -> None:
        super().__init__()
        self.main = main
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(count))

    def get_decoder(self) -> "Layers":
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("cost", [0.25, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("count", range(1, 13))
def test_a_step_takes_as_long_as_its_copies_or_as_its_layers(
    count: int, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a virtual clock: no copy waits where the link is the limit, also from step to step."""
    main = Clock()

    class Link(Clock):
        def __init__(self, _: torch.device) -> None: ...

        def follow(self) -> None:
            self.wait_event(main.time)

        def join(self) -> None:
            main.wait_event(self.time)

        def copied(self) -> float:
            return self.time

        def copy(self, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
            self.time += cost
            pair[0].copy_(pair[1])

    monkeypatch.setattr("dakrun.engine.staging.CopyStream", Link)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    model: Any = Layers(main, 12)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: setattr(main, "time", main.time + 1))
    sizes = Prefetch.tier_bytes(model, count)
    with allocate_tiers(sizes, CPU) as tiers, torch.inference_mode():
        prefetch = Prefetch(model, count, tiers, CPU)
        for layer in model.layers:
            prefetch.take(layer)
        prefetch.ready()
        times = []
        for _ in range(4):
            model(torch.zeros(4))
            times.append(main.time)
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert steps == [max(12, count * cost)] * 3


@contextmanager
def offloading(
    resident: PreTrainedModel, count: int, kind: type[HostLayers]
) -> Iterator[PreTrainedModel]:
    """A copy of `resident` with `count` of its layers in host memory, by `kind`."""
    model, where = copy.deepcopy(resident), "hbm" if kind is Prefetch else "host"
    with allocate_tiers(kind.tier_bytes(model, count), resident.device) as tiers:
        tier = tiers[where]
        whole = tier.allocate((tier.capacity,), torch.uint8).fill_(255)  # NaN, until written
        tier.used = 0
        held = kind(model, count, tiers, resident.device)
        for layer in decoder_layers(model):
            held.take(layer)
        held.ready()
        room = range(whole.data_ptr(), whole.data_ptr() + whole.nbytes)
        moved = [
            all(p.data_ptr() in room for p in layer.parameters()) for layer in decoder_layers(model)
        ]
        assert moved.count(True) == count
        yield model


def resident(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(tiny_models.CONFIGS[name])
    config.num_hidden_layers = LAYERS
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


@pytest.mark.parametrize(
    ("kind", "count"),
    [*((Prefetch, count) for count in range(1, LAYERS + 1)), (HostLayers, 3)],
)
@pytest.mark.parametrize("name", ["opt-like-350m", "llama-gqa3-tied"])
@torch.inference_mode()
def test_logits_equal_those_of_the_resident_model(
    name: str, count: int, kind: type[HostLayers]
) -> None:
    whole = resident(name, "cpu", torch.float32)
    with offloading(whole, count, kind) as model:
        for length in (9, 1, 4):
            ids = torch.randint(tiny_models.VOCAB, (2, length))
            assert torch.equal(model(ids).logits, whole(ids).logits)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "count"),
    [*((Prefetch, count) for count in (1, 2, 3, 5, LAYERS)), (HostLayers, 3)],
)
@pytest.mark.parametrize("name", ["opt-like-125m", "llama-gqa3-tied"])
@torch.inference_mode()
def test_steps_in_a_graph_equal_those_of_the_resident_model(
    name: str, count: int, kind: type[HostLayers]
) -> None:
    whole = resident(name, "cuda", torch.float16)
    prompt = torch.randint(tiny_models.VOCAB, (8, 5), device="cuda")
    logits: list[list[torch.Tensor]] = []
    with offloading(whole, count, kind) as model:
        for each in (whole, model):
            found = torch.empty(8, tiny_models.VOCAB, dtype=torch.float16, device="cuda")

            def keep(_: Any, __: Any, output: Any, found: torch.Tensor = found) -> None:
                found.copy_(output.logits[:, -1])

            each.register_forward_hook(keep)
            step = Step(each, prompt, 40)  # whose tensors the graph uses
            step()  # loads kernels
            torch.cuda.synchronize()
            graph = recorded(step)
            logits.append([])
            for _ in range(20):
                graph.replay()
                logits[-1].append(found.clone())
    assert all(map(torch.equal, *logits))
    assert not any(torch.equal(first, second) for first, second in itertools.pairwise(logits[0]))


@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_random_weights(name: str, ratio: float) -> None:
    """They are as transformers makes them, wherever they lie; the ratio is of whole layers."""
    config = parse_model_config(tiny_models.CONFIGS[name].to_dict(), name=name)
    reference = AutoModelForCausalLM.from_config(tiny_models.CONFIGS[name])
    place = built(meta_model(config), ratio, CPU, Prefetch)
    with torch.inference_mode(), place as (model, found):
        if config.mixture:  # torch's grouped products take rows of whole 16 bytes only
            model.set_experts_implementation("eager")
        assert (found == 0) == (ratio == 0) and (found >= ratio or ratio == 1)
        step = Step(model, torch.randint(tiny_models.VOCAB, (2, 5)), 16)
        step()  # the last layer has been in the ring
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        drawn = next(decoder_layers(model)[-1].self_attn.parameters())
        assert drawn.std() == pytest.approx(0.02, rel=0.1)
        tied = model.lm_head.weight is model.get_input_embeddings().weight
        assert tied == config.tied_embeddings
        for tensor, expected in zip(model.buffers(), reference.buffers(), strict=True):
            assert torch.equal(tensor, expected)
