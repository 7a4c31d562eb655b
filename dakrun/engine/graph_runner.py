"""Decode steps as CUDA graphs of the project's kernels, one graph for each batch bucket.

Knows rows and slots; what a step computes is the decoder's, what is sampled the sampler's.
"""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dakrun.engine.buckets import Bucket, buckets, fill_order, fitting
from dakrun.engine.graph import capture, replay_seconds
from dakrun.engine.packed_cache import PackedKVCache
from dakrun.engine.prompt_pass import PromptPass
from dakrun.engine.runner import Row, choose
from dakrun.kernels.attention import Workspace, splitk_flash_attn
from dakrun.kernels.attention_heuristics import AttentionConfig, attention_config
from dakrun.kernels.heuristics import TierAccess
from dakrun.kernels.select_greedy import select_greedy
from dakrun.models.kernel_decoder import Activations, KernelDecoder, Operands, Resident
from dakrun.models.layers import Segment
from dakrun.nn.remote_tier import sm_count

LOG_STEPS = 8  # tokens of a slot that are kept for the CPU, more than steps run ahead
IDLE = -1  # the slot, and the length, of a row without a request


@dataclass
class Replays:
    """How often each bucket was replayed, with how many rows that no request used."""

    count: Counter[int] = field(default_factory=Counter)
    padding: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Step:
    """A step that was launched: `sampled` is int64 [n] in host memory, where rows sample."""

    rows: Sequence[Row]
    start: torch.cuda.Event
    end: torch.cuda.Event
    sampled: torch.Tensor | None


class GraphRunner:
    """Slots whose steps the GPU takes by itself: tokens are fed back on the device.

    The CPU learns of them afterwards, when an event has passed, from a log in host memory. Between
    replays it changes which slots the rows of a bucket serve, in stream order.
    """

    ahead = 2

    def __init__(
        self,
        decoder: KernelDecoder,
        operands: Operands,
        cache: PackedKVCache,
        accesses: Sequence[TierAccess],
    ) -> None:
        """Captures all buckets; `accesses` says how attention reads the tiers."""
        self.order: Sequence[int] = fill_order(cache.counts)
        self.replays = Replays()
        self._gaps_s: list[float] = []  # between replays, on the GPU
        self.decoder, self._operands, self._cache = decoder, operands, cache
        self._accesses = tuple(accesses)
        self._prompts = PromptPass(decoder, cache)
        self._buckets = buckets(cache.counts)
        self._mapped: list[int] | None = None  # the slots of the rows
        self._steps: deque[_Step] = deque()
        self._last: _Step | None = None  # that was collected
        batch, device = cache.slots, decoder.like.device
        integers = torch.zeros(3, batch, dtype=torch.int32, device=device)
        self._tokens, self._slots, self._newest = integers  # the last one by slot
        self._lengths = torch.full_like(self._tokens, IDLE)
        self._log = torch.zeros(batch, LOG_STEPS, dtype=torch.int32, pin_memory=True)
        self._caches = cache.addresses.clone()  # by row
        self._activations = Activations.empty(decoder.config, batch, decoder.like)
        self._logits = decoder.like.new_empty(batch, decoder.config.vocab_size)
        self._attention: dict[Bucket, tuple[AttentionConfig, Workspace]] = {}
        self._capture()

    def details(self) -> dict[str, Any]:
        """How often each bucket was replayed, with how many rows of padding, and gaps between."""
        gaps = statistics.median(self._gaps_s) if self._gaps_s else None
        buckets = [
            {"rows": rows, "replays": count, "padding_rows": self.replays.padding[rows]}
            for rows, count in sorted(self.replays.count.items())
        ]
        return {"buckets": buckets, "replay_gap_s": gaps}

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [S, V] after the last token of each segment."""
        return self._prompts.logits(tokens, segments)

    @torch.inference_mode()
    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Put the first tokens where the next step finds them."""
        self._unmap()
        self._newest[self._on_gpu(slots)] = self._on_gpu(tokens)

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> None:
        """Replay the smallest bucket that holds all rows."""
        counts = [0] * len(self._cache.counts)
        for row in rows:
            counts[self._tier(row.slot)] += 1
        bucket = fitting(self._buckets, counts)
        mapped = self._arrange(rows, bucket)
        if mapped != self._mapped:
            self._map(mapped, rows)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graphs[bucket].replay()
        sampled = None
        if any(row.params.temperature > 0 for row in rows):
            sampled = self._sample(rows, mapped)
        end.record()
        self._steps.append(_Step(rows, start, end, sampled))
        self.replays.count[sum(bucket)] += 1
        self.replays.padding[sum(bucket)] += sum(bucket) - len(rows)

    def collect(self) -> list[int]:
        """The tokens of the oldest step."""
        step = self._steps.popleft()
        step.end.synchronize()
        if self._last is not None:
            self._gaps_s.append(self._last.end.elapsed_time(step.start) / 1e3)
        self._last = step
        if step.sampled is not None:
            return [int(token) for token in step.sampled]
        return [int(self._log[row.slot, row.position % LOG_STEPS]) for row in step.rows]

    def _sample(self, rows: Sequence[Row], mapped: Sequence[int]) -> torch.Tensor:
        """Draw the rows' tokens in place of the likeliest ones, which the graph has chosen."""
        places = self._on_gpu([mapped.index(row.slot) for row in rows]).long()
        chosen = choose(self._logits[places], rows)
        self._tokens[places] = chosen.int()
        kept = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
        return kept.copy_(chosen, non_blocking=True)

    def _capture(self) -> None:
        """Capture all buckets, the largest first, in one pool of memory."""
        self.graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        for bucket in reversed(self._buckets):
            self._attention[bucket] = self._attention_of(bucket)
            self._step(bucket)  # compiles kernels, all rows being idle
            self.graphs[bucket] = capture(lambda bucket=bucket: self._step(bucket), pool)  # type: ignore[misc]

    def _step(self, bucket: Bucket) -> None:
        """Launch a decode step of the rows of a bucket."""
        self._operands.begin()
        for _, launch in self._ops(bucket, self._operands):
            launch()
        self._operands.end()

    def _ops(
        self, bucket: Bucket, operands: Operands
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """The launches of a step, under the names of the plan's ops."""
        n, decoder = sum(bucket), self.decoder
        tokens, slots, lengths = (x[:n] for x in (self._tokens, self._slots, self._lengths))
        a, logits = self._activations.first(n), self._logits[:n]
        config, workspace = self._attention[bucket]

        def attend(layer: int, qkv: torch.Tensor, heads: torch.Tensor) -> None:
            q, k, v = decoder.heads(qkv)
            splitk_flash_attn(
                q, k, v, self._caches[layer, :n], lengths, config, workspace, heads,
                scale=decoder.scale, rotations=decoder.rotations, overlap=True,
            )  # fmt: skip

        yield "embedding", partial(decoder.embed, tokens, lengths, a.x)
        yield from decoder.ops(operands, a, attend)
        yield "lm_head", partial(decoder.logits, operands, a.x, logits)
        yield (
            "sampling",
            partial(select_greedy, logits, tokens, lengths, slots, self._log, overlap=True),
        )

    @torch.inference_mode()
    def op_seconds(self, length: int) -> dict[str, float]:
        """Seconds of a full batch's step by op, each op's launches of all layers in one graph.

        Slots are `length` positions long; matrices are read where they lie. No step may be running,
        and no request: what slots hold is overwritten.
        """
        bucket = self._buckets[-1]
        self._mapped = None
        self._slots.copy_(self._on_gpu(range(sum(bucket))))
        self._caches.copy_(self._cache.addresses)
        launches: dict[str, list[Callable[[], object]]] = defaultdict(list)
        for name, launch in self._ops(bucket, Resident(self.decoder.matrices)):
            launches[name].append(launch)
        found = {}
        for name, chain in launches.items():
            self._lengths.fill_(length)
            found[name] = replay_seconds(lambda chain=chain: [launch() for launch in chain])  # type: ignore[misc]
        self._lengths.fill_(IDLE)
        return found

    def _attention_of(self, bucket: Bucket) -> tuple[AttentionConfig, Workspace]:
        cache, device = self._cache, self.decoder.like.device
        config = attention_config(
            cache.shape, bucket, self._accesses, sms=sm_count(device), capacity=cache.slots
        )
        model = self.decoder.config
        group = model.num_heads // model.num_kv_heads
        return config, Workspace.empty(config, group, device)

    def _tier(self, slot: int) -> int:
        tier = 0
        while slot >= self._cache.counts[tier]:
            slot -= self._cache.counts[tier]
            tier += 1
        return tier

    def _arrange(self, rows: Sequence[Row], bucket: Bucket) -> list[int]:
        """A slot, or IDLE, for every row of a bucket; where it can be, what is mapped already."""
        wanted, before = {row.slot for row in rows}, self._mapped or []
        if len(before) == sum(bucket) and {slot for slot in before if slot != IDLE} == wanted:
            return before
        mapped: list[int] = []
        for tier, room in enumerate(bucket):
            here = sorted(slot for slot in wanted if self._tier(slot) == tier)
            mapped += here + [IDLE] * (room - len(here))
        return mapped

    def _map(self, mapped: list[int], rows: Sequence[Row]) -> None:
        """Let the rows of the next replays serve the slots `mapped`."""
        self._unmap()
        positions = {row.slot: row.position for row in rows}
        n = len(mapped)
        slots = self._on_gpu([max(slot, 0) for slot in mapped])
        self._slots[:n] = slots
        self._lengths[:n] = self._on_gpu([positions.get(slot, IDLE) for slot in mapped])
        self._tokens[:n] = self._newest[slots]
        self._caches[:, :n] = self._cache.addresses[:, slots]
        self._mapped = mapped

    def _unmap(self) -> None:
        """Keep the newest tokens of the slots that rows serve."""
        if self._mapped is not None:
            places = [(i, slot) for i, slot in enumerate(self._mapped) if slot != IDLE]
            rows, slots = (self._on_gpu(numbers) for numbers in zip(*places, strict=True))
            self._newest[slots] = self._tokens[rows]
        self._mapped = None

    def _on_gpu(self, numbers: Sequence[int]) -> torch.Tensor:
        """int32 on the GPU, without waiting for it."""
        pinned = torch.tensor(numbers, dtype=torch.int32, pin_memory=True)
        return pinned.to(self.decoder.like.device, non_blocking=True)
