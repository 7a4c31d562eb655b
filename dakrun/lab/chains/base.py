"""Base class of chains: buffers with random operands, dense operands for torch, and times.

Knows no kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dakrun.hardware import LOCAL, Card
from dakrun.lab.cases import Case, Operand
from dakrun.lab.chain import Launch, launch_seconds
from dakrun.lab.memory import Buffers, fill_random
from dakrun.launches import TierAccess
from dakrun.memory.tiers import aligned


@dataclass
class Chains(ABC):
    """Chains over operands of `dtype` in `buffers`; times are seconds of a launch, by replay."""

    buffers: Buffers
    dtype: torch.dtype
    card: Card
    replays: int

    @property
    def device(self) -> torch.device:
        return self.buffers[LOCAL].device

    _scale = 0.0  # of the values in the buffers

    def fill(self, operand: Operand) -> None:
        """Write normal values of the operand's scale into all buffers."""
        if operand.scale != self._scale:
            self._scale = operand.scale
            fill_random(self.buffers, self.dtype, scale=operand.scale)

    @abstractmethod
    def kernel(
        self, case: Case, access: Sequence[TierAccess], layout: Card | None = None
    ) -> tuple[list[float], str]:
        """Times with the case's units in each tier, and the name of the kernel.

        Row blocks are laid out for the card `layout`, if given.
        """

    @abstractmethod
    def baseline(self, case: Case) -> list[float]:
        """Times of torch's kernel with the case's operands contiguous in HBM."""

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def dense(self, case: Case, size: Sequence[int], each: int = 1) -> list[torch.Tensor]:
        """Tensors of `size` one after the other in HBM: `each` for every launch."""
        nbytes = torch.Size(size).numel() * self.dtype.itemsize
        starts = range(0, each * case.launches * aligned(nbytes), aligned(nbytes))
        local = self.buffers[LOCAL]
        return [local[at : at + nbytes].view(self.dtype).view(*size) for at in starts]

    def seconds(self, case: Case, launch: Launch) -> list[float]:
        return launch_seconds(launch, case.launches, replays=self.replays)
