"""Prefill on the GPU: prompts through the layers, their keys and values into packed slots.

Knows segments of slots; products are the decoder's, attention is torch's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from dakrun.engine.packed_cache import PackedKVCache
from dakrun.engine.prompt_attention import Lengths, causal_attention
from dakrun.engine.prompt_slots import PromptSlots
from dakrun.memory.device import upload
from dakrun.models.kernel_decoder import Activations, KernelDecoder, Operands
from dakrun.plan.segments import Segment


@dataclass(frozen=True)
class _Run:
    """Segments that attention takes together: `rows` of the pass's tokens.

    Those that begin, or one that goes on in `slot` behind `cached` positions.
    """

    rows: slice
    queries: Lengths
    keys: Lengths
    slot: int
    cached: int


class PromptPass:
    """Runs prompts of a decoder whose slots are in `cache`; `operands` are those of such passes.

    A pass has at most `chunk_tokens`. `room` is memory of the device, uint8, that keys and values
    of remote slots go through.
    """

    def __init__(
        self,
        decoder: KernelDecoder,
        operands: Operands,
        cache: PackedKVCache,
        room: torch.Tensor,
        chunk_tokens: int,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._decoder, self._operands, self._cache = decoder, operands, cache
        self._slots = PromptSlots(cache, room)

    def logits(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [S, V] after each segment; `tokens` are those of all, one after the other."""
        decoder, device = self._decoder, self._decoder.like.device
        spans = [torch.arange(s.start, s.start + s.length) for s in segments]
        positions = upload(torch.cat(spans).int(), device)
        ids = upload(torch.tensor(tokens, dtype=torch.int32), device)
        ends = upload(torch.tensor([s.length for s in segments]).cumsum(0) - 1, device)
        runs = list(_runs(segments, device))
        a = Activations.empty(decoder.config, len(ids), decoder.like)
        self._slots.begin(segments)
        self._operands.begin()
        decoder.embed(ids, positions, a.x)

        def attend(layer: int, qkv: torch.Tensor, heads: torch.Tensor) -> None:
            q, k, v = decoder.heads(qkv)
            joined = qkv.view(len(qkv), -1, decoder.config.head_dim)
            self._slots.store(layer, joined, positions, decoder.rotations)
            for run in runs:
                keys, values = k[run.rows], v[run.rows]
                if run.cached:
                    before = self._cache.read(layer, run.slot, run.cached)
                    keys, values = (
                        torch.cat((first.transpose(0, 1), rest))
                        for first, rest in zip(before, (keys, values), strict=True)
                    )
                found = causal_attention(
                    q[run.rows], keys, values, run.queries, run.keys, scale=decoder.scale
                )
                heads[run.rows] = found.flatten(1)

        for _, launch in decoder.ops(self._operands, a, attend):
            launch()
        logits = decoder.like.new_empty(len(segments), decoder.config.vocab_size)
        decoder.logits(self._operands, a.x[ends], logits)
        self._operands.end()
        self._slots.end()
        return logits


def _runs(segments: Sequence[Segment], device: torch.device) -> Iterator[_Run]:
    """Segments in their order, those that begin as many at once as follow each other."""
    first = 0
    for key, group in groupby(enumerate(segments), lambda s: s[0] if s[1].start else -1):
        some = [s for _, s in group]
        lengths = [s.length for s in some]
        queries, cached = Lengths.of(lengths, device), some[0].start if key >= 0 else 0
        keys = Lengths.of([cached + lengths[0]], device) if cached else queries
        rows = slice(first, first + sum(lengths))
        yield _Run(rows, queries, keys, some[0].slot, cached)
        first = rows.stop
