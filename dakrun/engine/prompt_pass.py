"""Prefill on the GPU: prompts through the layers, their keys and values into packed slots.

Knows segments of slots; products are the decoder's, attention is torch's.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dakrun.engine.packed_cache import PackedKVCache
from dakrun.models.kernel_decoder import Activations, KernelDecoder, Resident
from dakrun.models.layers import Segment, rotate


class PromptPass:
    """Runs prompts of a decoder whose slots are in `cache`."""

    def __init__(self, decoder: KernelDecoder, cache: PackedKVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._operands = Resident(decoder.matrices)

    def logits(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [S, V] after each segment; `tokens` are those of all, one after the other."""
        decoder = self._decoder
        like = decoder.like
        spans = [range(s.start, s.start + s.length) for s in segments]
        ids = torch.tensor(tokens, dtype=torch.int32, device=like.device)
        positions = torch.tensor(
            [p for span in spans for p in span], dtype=torch.int32, device=like.device
        )
        fresh = [s for s in segments if not s.start]
        rows, places, shape = _padded(segments, like.device)
        a = Activations.empty(decoder.config, len(ids), like)
        decoder.embed(ids, positions, a.x)

        def attend(layer: int, qkv: torch.Tensor, heads: torch.Tensor) -> None:
            q, k, v = decoder.heads(qkv)
            if decoder.rotations is not None:
                cos, sin = decoder.rotations[positions.long(), None].unbind(-1)
                q, k = (rotate(x.float(), cos, sin).to(x.dtype) for x in (q, k))
            first = 0
            for s in segments:
                part = slice(first, first + s.length)
                keys, values = k[part].transpose(0, 1), v[part].transpose(0, 1)
                self._cache.write(layer, s.slot, keys, values, s.start)
                if s.start:
                    heads[part] = self._continued(layer, s, q[part])
                first += s.length
            if fresh:
                heads[rows] = self._fresh(q[rows], k[rows], v[rows], places, shape)

        for _, launch in decoder.ops(self._operands, a, attend):
            launch()
        ends = torch.tensor([s.length for s in segments], device=like.device).cumsum(0) - 1
        logits = like.new_empty(len(segments), decoder.config.vocab_size)
        decoder.logits(self._operands, a.x[ends], logits)
        return logits

    def _fresh(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        places: torch.Tensor,
        shape: tuple[int, int],
    ) -> torch.Tensor:
        """[T, Hq * D] of prompts that begin, q [T, Hq, D], k and v [T, Hkv, D], all at once.

        They are padded to `shape`, [prompts, length], token i being at `places`[i] of that. Padding
        comes last, so that no token sees it.
        """

        def padded(x: torch.Tensor) -> torch.Tensor:
            room = x.new_zeros(shape[0] * shape[1], *x.shape[1:])
            return room.index_copy_(0, places, x).view(*shape, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            padded(q), padded(k), padded(v), is_causal=True, scale=self._decoder.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2).flatten(0, 1)[places].flatten(1)

    def _continued(self, layer: int, s: Segment, q: torch.Tensor) -> torch.Tensor:
        """[L, Hq * D] of q [L, Hq, D], whose keys and values are cached behind those before."""
        end = s.start + s.length
        keys, values = self._cache.read(layer, s.slot, end)
        mask = torch.ones(s.length, end, dtype=torch.bool, device=q.device).tril(s.start)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask,
            scale=self._decoder.scale, enable_gqa=q.shape[1] != keys.shape[0],
        )  # fmt: skip
        return out[0].transpose(0, 1).reshape(s.length, -1)


def _padded(
    segments: Sequence[Segment], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Of the prompts that begin: their tokens' rows, places in a padded batch, and its shape."""
    rows: list[int] = []
    places: list[int] = []
    longest = max((s.length for s in segments if not s.start), default=0)
    first = prompts = 0
    for s in segments:
        if not s.start:
            rows += range(first, first + s.length)
            places += range(prompts * longest, prompts * longest + s.length)
            prompts += 1
        first += s.length
    both = torch.tensor([rows, places], device=device)
    return both[0], both[1], (prompts, longest)
