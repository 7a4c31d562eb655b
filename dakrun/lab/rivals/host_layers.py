"""Layers of a transformers model in host memory, evenly spread: read there in place, or copied.

In place is the scheme of vLLM's UVA offloader: kernels of cuBLAS and torch read page-locked memory
over the link. Copied to HBM ahead of their use is that of FlexGen and of vLLM's prefetch offloader:
whole layers, two buffers of a layer in HBM (see `buffers`), and a stream that copies while other
layers compute. Knows no plans.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from dakrun.engine import StagingRing
from dakrun.hardware import LOCAL
from dakrun.lab.rivals.architecture import decoder_layers, materialise, weight_bytes
from dakrun.memory.device import device_view
from dakrun.memory.tiers import HOST, Tier, aligned, allocate_tiers
from dakrun.units import ceil_div


class HostLayers:
    """Keeps `count` decoder layers of a transformers `model` in host memory, at least one.

    The model's parameters may still be on the meta device; `take` moves the values of a layer once
    it has them, and `ready` follows the last of them. The caller allocates and closes `tiers`, of
    `tier_bytes`. `device` computes.
    """

    def __init__(
        self, model: PreTrainedModel, count: int, tiers: Mapping[str, Tier], device: torch.device
    ) -> None:
        layers, nbytes = decoder_layers(model), max(layer_bytes(model))
        self._sources = [tiers[HOST].allocate((nbytes,), torch.uint8) for _ in range(count)]
        self._numbers = {layers[at]: number for number, at in enumerate(spread(count, len(layers)))}
        self._places = [device_view(source, device) for source in self._sources]  # of weights

    def take(self, layer: torch.nn.Module) -> None:
        """Move the values of `layer` to host memory if it is one of the `count`."""
        if layer not in self._numbers:
            return
        number, at = self._numbers[layer], 0
        for parameter in layer.parameters():
            span = slice(at, at + parameter.nbytes)
            place, source = (
                room[span].view(parameter.dtype).view(parameter.shape)
                for room in (self._places[number], self._sources[number])
            )
            source.copy_(parameter)
            parameter.data = place
            at += aligned(parameter.nbytes)

    def ready(self) -> None:
        """Prepare the first pass."""

    @staticmethod
    def tier_bytes(model: PreTrainedModel, count: int) -> dict[str, int]:
        """Bytes of each tier for `count` layers of `model` in host memory."""
        return {HOST: count * max(layer_bytes(model))}


class Prefetch(HostLayers):
    """Every pass of the model copies each of its layers in host memory to HBM ahead of its use."""

    def __init__(
        self, model: PreTrainedModel, count: int, tiers: Mapping[str, Tier], device: torch.device
    ) -> None:
        super().__init__(model, count, tiers, device)
        room = tiers[LOCAL].allocate((tiers[LOCAL].capacity,), torch.uint8)
        # A single layer is copied while those before it compute: its one buffer is free then.
        self._ring = StagingRing([[source] for source in self._sources], room, early=count > 1)
        self._places = [place for (place,) in self._ring.staged]
        model.register_forward_pre_hook(lambda *_: self._ring.begin())
        for layer, number in self._numbers.items():
            layer.register_forward_pre_hook(lambda *_, number=number: self._ring.wait(number))
            layer.register_forward_hook(lambda *_, number=number: self._ring.free(number))
        model.register_forward_hook(lambda *_: self._ring.end())

    def ready(self) -> None:
        """Copy what the first pass expects in HBM."""
        self._ring.fill()

    @staticmethod
    def tier_bytes(model: PreTrainedModel, count: int) -> dict[str, int]:
        """Bytes of each tier for `count` layers of `model` in host memory."""
        room = buffers(count) * max(layer_bytes(model))
        return {LOCAL: room, **HostLayers.tier_bytes(model, count)}


@contextmanager
def built(
    model: PreTrainedModel, ratio: float, device: torch.device, kind: type[HostLayers] = HostLayers
) -> Iterator[tuple[PreTrainedModel, float]]:
    """Put `model`, of transformers on the meta device, on `device` with random weights.

    As many layers as `ratio` of its weight bytes needs are in host memory meanwhile, at most all,
    by `kind`. Yields the model and the ratio that they are. Raises CannotRun if host memory is
    short, and torch.OutOfMemoryError.
    """
    count = offloaded(model, ratio)
    if not count:
        materialise(model, model, device)
        model.tie_weights()
        yield model, 0.0
        return
    with allocate_tiers(kind.tier_bytes(model, count), device) as tiers:
        held = kind(model, count, tiers, device)
        for layer in decoder_layers(model):  # one by one: HBM may not have room for all
            materialise(layer, model, device)
            held.take(layer)
        materialise(model, model, device)
        model.tie_weights()
        held.ready()
        yield model, _held_bytes(model, count) / weight_bytes(model)


def offloaded(model: PreTrainedModel, ratio: float) -> int:
    """The number of layers that hold `ratio` of the weight bytes, to 2%, or else all of them.

    A ratio of whole layers by a count without norms, biases and positions is that many layers.
    """
    wanted, most = 0.98 * ratio * weight_bytes(model), len(decoder_layers(model))
    return next((n for n in range(most) if _held_bytes(model, n) >= wanted), most)


def spread(count: int, layers: int) -> list[int]:
    """The numbers of `count` of `layers` layers, each the last one of a group; evenly spread."""
    return [ceil_div(number * layers, count) - 1 for number in range(1, count + 1)]


def buffers(count: int) -> int:
    """Buffers in HBM for `count` layers used in turn, as few as the copies need: two if they can.

    The first and the last layer of a step never share one, so that the copies of the next step
    follow at once.
    """
    return next(n for n in itertools.count(2) if (count - 1) % n) if count > 1 else 1


def layer_bytes(model: PreTrainedModel) -> list[int]:
    """Bytes of each decoder layer with its parameters one after the other."""
    return [sum(aligned(p.nbytes) for p in layer.parameters()) for layer in decoder_layers(model)]


def _held_bytes(model: PreTrainedModel, count: int) -> int:
    """Bytes of the `count` layers that are in host memory."""
    sizes = layer_bytes(model)
    return sum(sizes[at] for at in spread(count, len(sizes)))
