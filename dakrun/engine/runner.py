"""What the engine asks of whatever computes: prefill, decode steps, and their tokens.

`TorchRunner` is the reference, one step at a time on any device; graph_runner.py has that of the
GPU's kernels.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dakrun.config import SamplingParams
from dakrun.engine.kvcache import KVCache
from dakrun.engine.sampler import sample
from dakrun.models.layers import Decoder
from dakrun.plan.ops import PREFILL_CHUNK_TOKENS
from dakrun.plan.segments import Segment


class Row(NamedTuple):
    """A request's part in a decode step.

    Its newest token, number `step` of those generated, enters `slot` at `position`; the next one
    is drawn as `params` and `seed` say.
    """

    slot: int
    position: int
    step: int
    params: SamplingParams
    seed: int


class Runner(Protocol):
    """A model in its tiers, with slots for requests.

    `order` are the slots, those to fill first first. `ahead` steps may be launched before the
    tokens of the oldest are collected. `chunk_tokens` are those that prefill takes, at most.
    """

    order: Sequence[int]
    ahead: int
    chunk_tokens: int

    def op_seconds(self, length: int) -> Mapping[str, float]:
        """Seconds of a decode step by op, as far as known; of a full batch of such lengths.

        No request may be running.
        """
        ...

    def details(self) -> dict[str, Any]:
        """What else a report says of the run, JSON-ready."""
        ...

    def prefill(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Cache the concatenated tokens of all segments; logits [S, V] after each segment."""
        ...

    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Give slots their first generated tokens, which the next decode step starts from."""
        ...

    def launch(self, rows: Sequence[Row]) -> None:
        """Start a decode step: the newest token of every row goes in, its next one comes out."""
        ...

    def collect(self) -> list[int]:
        """The tokens of the oldest step that was launched, in the order of its rows; waits."""
        ...

    def drop(self) -> None:
        """Forget all steps that were launched, whose tokens nobody wants; waits for them."""
        ...


class Chosen:
    """The next tokens of some rows, on their way from the device."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """As `choose` does, from logits [n, V], without waiting for it."""
        chosen = choose(logits, rows)
        self._ready: torch.cuda.Event | None = None
        self._tokens = chosen
        if chosen.is_cuda:
            kept = torch.empty(len(rows), dtype=chosen.dtype, pin_memory=True)
            self._tokens = kept.copy_(chosen, non_blocking=True)
            self._ready = torch.cuda.current_stream().record_event()

    def tokens(self) -> list[int]:
        """They, in the order of the rows; waits."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._tokens.tolist()  # type: ignore[no-any-return]


class TorchRunner:
    """A decoder in plain torch: a step is done when `launch` returns."""

    ahead = 1
    chunk_tokens = PREFILL_CHUNK_TOKENS

    def __init__(self, decoder: Decoder, cache: KVCache, device: torch.device) -> None:
        self.order: Sequence[int] = range(cache.slots)
        self.decoder, self.cache, self._device = decoder, cache, device
        self._steps = 0
        self._newest: dict[int, int] = {}  # token by slot
        self._chosen: deque[list[int]] = deque()  # by step

    def op_seconds(self, length: int) -> Mapping[str, float]:
        """Seconds by op, the mean of all steps so far, on a CPU."""
        del length
        return {name: total / self._steps for name, total in self.decoder.op_seconds.items()}

    def details(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [S, V] after the last token of each segment."""
        ids = torch.tensor(tokens, device=self._device)
        hidden = self.decoder.prefill(ids, segments, self.cache)
        ends = torch.tensor([s.length for s in segments], device=self._device).cumsum(0) - 1
        return self.decoder.logits(hidden[ends])

    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Remember the newest tokens."""
        self._newest.update(zip(slots, tokens, strict=True))

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> None:
        """Compute a step."""
        slots = [row.slot for row in rows]
        tokens = torch.tensor([self._newest[slot] for slot in slots], device=self._device)
        positions = [row.position for row in rows]
        logits = self.decoder.decode(tokens, positions, slots, self.cache)
        self._steps += 1
        self._chosen.append(choose(logits, rows).tolist())
        self.begin(slots, self._chosen[-1])

    def collect(self) -> list[int]:
        """The tokens of the oldest step."""
        return self._chosen.popleft()

    def drop(self) -> None:
        """Nothing is under way."""
        self._chosen.clear()


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """The next token of each row, int64 [n], from logits [n, V]."""
    return sample(logits, [r.params for r in rows], [r.seed for r in rows], [r.step for r in rows])
