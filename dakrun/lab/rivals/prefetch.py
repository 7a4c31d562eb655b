"""Layers of a transformers model in host memory, brought to HBM by the copy engine ahead of use.

The scheme of FlexGen and of vLLM's prefetch offloader: whole layers, evenly spread, two buffers of
a layer in HBM (see `buffers`), and a stream that copies while other layers compute. Knows no plans.
"""

import itertools
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from dakrun.engine import StagingRing
from dakrun.hardware import LOCAL
from dakrun.lab.rivals.host_layers import HostLayers, layer_bytes
from dakrun.memory.tiers import Tier


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


def buffers(count: int) -> int:
    """Buffers in HBM for `count` layers used in turn, as few as the copies need: two if they can.

    The first and the last layer of a step never share one, so that the copies of the next step
    follow at once.
    """
    return next(n for n in itertools.count(2) if (count - 1) % n) if count > 1 else 1
