"""The time of another program's decode step, with the same architecture and random weights.

Models of transformers have a static KV cache in HBM. Knows no plans.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, StaticCache

from dakrun.config import ModelConfig
from dakrun.lab.chain import graph_seconds
from dakrun.lab.rivals import on_demand, vllm
from dakrun.lab.rivals.architecture import decoder_layers, meta_model, weight_bytes
from dakrun.lab.rivals.host_layers import HostLayers, Prefetch, built, offloaded
from dakrun.lab.samples import call_seconds
from dakrun.units import ceil_div

ALIGNMENT = 8  # positions: torch's attention needs mask rows aligned to 16 bytes
BLOCK = 2**24 + 3  # random values that are repeated in weights; odd, so that rows differ


@dataclass(frozen=True)
class RivalStep:
    """Seconds of a decode step with `ratio` of its `weight_bytes` in host memory."""

    seconds: float
    ratio: float
    weight_bytes: int = 0


def rival_step(
    name: str, config: ModelConfig, *, ratio: float = 0.0, batch_size: int, prompt_len: int,
    new_tokens: int, device: torch.device, vllm_python: Path | None = None,
) -> RivalStep:  # fmt: skip
    """The median of as many decode steps on `device` as `new_tokens` allow.

    `ratio` of the weight bytes is in host memory. "prefetch" has whole layers there and copies them
    ahead of use, "uva" reads them in place; "on-demand" has experts there, "accelerate" the last
    layers, and both copy at use; "transformers" has all weights in HBM. "vllm-prefetch" and
    "vllm-uva" are vLLM with its offloaders, by the interpreter `vllm_python`. Steps are CUDA
    graphs, but for "on-demand" and "accelerate", which wait for the CPU. Raises CannotRun if the
    program has no such model or host memory is short, and torch.OutOfMemoryError if the model
    does not fit the GPU.
    """
    whole = meta_model(config)
    total = weight_bytes(whole)
    if name in vllm.RIVALS:
        assert vllm_python
        sizes = {"batch_size": batch_size, "prompt_len": prompt_len, "new_tokens": new_tokens}
        return RivalStep(*vllm.step(vllm_python, name, whole, ratio, **sizes), total)
    runs = max(2, (new_tokens - 2) // 3)  # graph_seconds() runs up to 3 x runs + 2 steps
    room, warm_up = prompt_len + max(new_tokens, 3 * runs + 2), runs
    if eager := name == "accelerate":
        runs, room, warm_up = new_tokens - 1, prompt_len + new_tokens, 0
        place = dispatched(whole, ratio, device)
    elif eager := name == "on-demand" and ratio > 0:
        place = on_demand.built(whole, config, ratio, device, batch_size)
    else:
        place = built(whole, ratio, device, Prefetch if name == "prefetch" else HostLayers)
    with torch.device(device), torch.inference_mode(), place as (model, found):
        step = Step(model, torch.randint(config.vocab_size, (batch_size, prompt_len)), room)
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        times = (
            call_seconds(step, runs, warm_up=warm_up, wait=wait)
            if eager
            else graph_seconds(step, runs)
        )
    return RivalStep(statistics.median(times), found, total)


class Step:
    """Decode steps of a transformers `model`; each writes the next tokens to `token`, int64 [n, 1].

    The constructor prefills `prompt`, int64 [n, P]. The cache has `room` positions.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, room: int) -> None:
        room = ceil_div(room, ALIGNMENT) * ALIGNMENT
        self._model = model
        self._cache = StaticCache(model.config, max_cache_len=room)
        self._slots = torch.arange(room, device=prompt.device)
        self._position = torch.full((1, 1), prompt.shape[1], device=prompt.device)
        self.token = self._next(prompt)

    def __call__(self) -> None:
        """Launch a step without synchronizing, so that a CUDA graph can capture it."""
        batch = self.token.shape[0]
        # Given explicitly: transformers would read the cache's length from the device.
        seen = (self._slots <= self._position).view(1, 1, 1, -1).expand(batch, -1, -1, -1)
        positions = self._position.expand(batch, 1)
        self.token.copy_(self._next(self.token, attention_mask=seen, position_ids=positions))
        self._position.add_(1)

    def _next(self, ids: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
        """The most likely next tokens after `ids`: int64 [n, 1]."""
        output = self._model(ids, past_key_values=self._cache, logits_to_keep=1, **positions)
        tokens: torch.Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        return tokens


@contextmanager
def dispatched(
    model: PreTrainedModel, ratio: float, device: torch.device
) -> Iterator[tuple[PreTrainedModel, float]]:
    """accelerate's hooks around `model`, on the meta device, with random weights.

    The last layers are in host memory, as many as `ratio` of all weight bytes needs. Yields the
    model and the ratio that they are.
    """
    from accelerate import dispatch_model  # type: ignore[import-not-found]

    layers, total, here = decoder_layers(model), weight_bytes(model), device.index or 0
    each = weight_bytes(layers[0])
    count = offloaded(model, ratio)
    names = {id(module): name for name, module in model.named_modules()}
    places: dict[str, str | int] = {}
    for number, layer in enumerate(layers):
        places[names[id(layer)]] = place = "cpu" if number >= len(layers) - count else here
        layer.to_empty(device="cpu" if place == "cpu" else device)
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not name.startswith(f"{names[id(layers)]}."):
            module.to_empty(device=device, recurse=False)
            places[name] = here
    block = 0.01 * torch.randn(BLOCK, dtype=next(model.parameters()).dtype, device=device)
    for parameter in model.parameters():
        repeat(parameter, block)
    model.tie_weights()
    yield dispatch_model(model, places, main_device=here, force_hooks=True), count * each / total


def repeat(parameter: torch.Tensor, block: torch.Tensor) -> None:
    """Repeat random values in a weight: with constants a GPU draws less power and clocks higher."""
    for part in parameter.view(-1).split(len(block)):
        part.copy_(block[: len(part)])
