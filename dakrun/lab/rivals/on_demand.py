"""Experts of a transformers model in host memory, brought to HBM when a router has chosen them.

The scheme of on-demand offloaders: a layer's choice goes to the CPU, which has the copy engine
bring the chosen experts that are not in HBM into buffers there, whole experts, and launches the
products of those that are there meanwhile. Those chosen most often stay in HBM. Knows no plans.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from dakrun.config import ModelConfig, Popularity
from dakrun.hardware import LOCAL
from dakrun.kernels.runtime import CopyStream
from dakrun.lab.rivals.architecture import decoder_layers, materialise, weight_bytes
from dakrun.memory.tiers import HOST, aligned, allocate_tiers
from dakrun.units import ceil_div

BUFFERS = 4  # experts in HBM on their way to products
DRAWN_STEPS = 64  # whose choices are drawn; later steps repeat them
STANDARD_DEVIATION = 0.02


class Sizes(NamedTuple):
    """Sizes of an expert: columns of its input, and of what is between its matrices."""

    hidden: int
    ffn: int

    @property
    def elements(self) -> int:
        """Elements of all matrices."""
        return 3 * self.hidden * self.ffn

    def views(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up [2 I, H], and down [H, I], in a tensor of so many elements."""
        up, down = room.split((2 * self.hidden * self.ffn, self.hidden * self.ffn))
        return up.view(2 * self.ffn, self.hidden), down.view(self.hidden, self.ffn)


class Buffers:
    """Buffers in HBM for experts that are copied there, used in turn; `rooms` are [elements]."""

    def __init__(self, rooms: Sequence[torch.Tensor]) -> None:
        self.count, self._rooms, self._next = len(rooms), rooms, 0
        self._stream = CopyStream(rooms[0].device)

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start to copy an expert, behind all launches so far; its buffer, and when it is there."""
        room = self._rooms[self._next]
        self._next = (self._next + 1) % self.count
        self._stream.follow()
        self._stream.copy((room, source))
        return room, self._stream.copied()


class OnDemandExperts(torch.nn.Module):
    """A layer's experts, with the interface of transformers' modules.

    `experts` are tensors [elements] by number, in host memory those of `remote`. With `choices`,
    int64 [steps, n, k], decode steps of n rows choose these instead of what the router says.
    """

    def __init__(
        self,
        sizes: Sizes,
        experts: Sequence[torch.Tensor],
        remote: frozenset[int],
        buffers: Buffers,
        choices: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._sizes, self._experts, self._remote = sizes, experts, remote
        self._places, self._choices, self._steps = buffers, choices, 0
        self.copied = 0  # experts so far

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sums [n, H] of rows [n, H] over their experts [n, k]; waits for the choice."""
        if self._choices is not None and self._choices.shape[1:] == top_k_index.shape:
            top_k_index = self._choices[self._steps % len(self._choices)]
            self._steps += 1
        chosen = top_k_index.flatten().cpu()  # waits
        of_pairs, order = chosen.sort(stable=True)
        numbers, counts = (of.tolist() for of in of_pairs.unique_consecutive(return_counts=True))
        pairs = order.to(hidden_states.device, non_blocking=True).split(counts)
        weights, k = top_k_weights.flatten(), top_k_index.shape[1]
        out = torch.zeros_like(hidden_states)

        def add(at: int, expert: torch.Tensor) -> None:
            tokens = pairs[at] // k
            gate_up, down = self._sizes.views(expert)
            gate, up = F.linear(hidden_states[tokens], gate_up).chunk(2, dim=-1)
            found = F.linear(F.silu(gate) * up, down)
            out.index_add_(0, tokens, (found * weights[pairs[at], None]).to(out.dtype))

        waiting = deque(at for at, number in enumerate(numbers) if number in self._remote)
        self.copied += len(waiting)
        under_way = deque(
            (at, *self._places.fetch(self._experts[numbers[at]]))
            for at in [waiting.popleft() for _ in range(min(self._places.count, len(waiting)))]
        )
        for at, number in enumerate(numbers):
            if number not in self._remote:
                add(at, self._experts[number])
        while under_way:
            at, room, ready = under_way.popleft()
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            add(at, room)
            if waiting:
                at = waiting.popleft()
                under_way.append((at, *self._places.fetch(self._experts[numbers[at]])))
        return out


@contextmanager
def built(
    model: PreTrainedModel, config: ModelConfig, ratio: float, device: torch.device, rows: int
) -> Iterator[tuple[PreTrainedModel, float]]:
    """Put `model`, of transformers on the meta device, on `device` with random weights.

    As many experts of each layer as `ratio` of all weight bytes needs are in host memory meanwhile,
    those of least use, at most all. Decode steps of `rows` rows choose by the model's `choices`, if
    it has any. Yields the model and the ratio that they are. Raises CannotRun if host memory is
    short, and torch.OutOfMemoryError.
    """
    mixture = config.mixture
    assert mixture, "a model with experts"
    blocks = [layer.mlp for layer in decoder_layers(model) if hasattr(layer.mlp, "experts")]
    sizes, count = Sizes(config.hidden_size, mixture.ffn_size), mixture.routing.experts
    dtype = next(model.parameters()).dtype
    nbytes, total = sizes.elements * dtype.itemsize, weight_bytes(model)
    held = min(count, ceil_div(round(ratio * total), len(blocks) * nbytes))
    capacities = {
        LOCAL: (len(blocks) * (count - held) + BUFFERS) * aligned(nbytes),
        HOST: max(1, len(blocks) * held) * aligned(nbytes),
    }
    with allocate_tiers(capacities, device) as tiers:
        rooms = [tiers[LOCAL].allocate((sizes.elements,), dtype) for _ in range(BUFFERS)]
        buffers = Buffers(rooms)
        for number, block in enumerate(blocks):
            order = mixture.choices.orders[number] if mixture.choices else range(count)
            remote = frozenset(order[count - held :])
            experts, choices = [], None
            for expert in range(count):
                tier = tiers[HOST if expert in remote else LOCAL]
                experts.append(tier.allocate((sizes.elements,), dtype))
                experts[-1].copy_(rooms[0].normal_(0, STANDARD_DEVIATION))
            if mixture.choices:
                choices = drawn(mixture.choices, number, rows, mixture.routing.top_k).to(device)
            block.experts = OnDemandExperts(sizes, experts, remote, buffers, choices)
        materialise(model, model, device)
        model.tie_weights()
        yield model, len(blocks) * held * nbytes / total


def drawn(popularity: Popularity, layer: int, rows: int, top_k: int) -> torch.Tensor:
    """Choices int64 [DRAWN_STEPS, rows, k] of the layer number `layer` of those with experts.

    Experts are drawn one by one without replacement: the first clocks to ring (Popularity.zipf).
    """
    chances = torch.tensor(popularity.chances(top_k, 1), dtype=torch.float64)
    rates = torch.empty_like(chances)
    rates[list(popularity.orders[layer])] = -torch.log1p(-chances.clamp(max=1 - 1e-9))
    generator = torch.Generator().manual_seed(layer)
    shape = DRAWN_STEPS, rows, len(rates)
    clocks = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)
    return (clocks / rates).topk(top_k, largest=False).indices
