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
                heads[part] = self._attend(layer, s, q[part], k[part], v[part])
                first += s.length

        for _, launch in decoder.ops(self._operands, a, attend):
            launch()
        ends = torch.tensor([s.length for s in segments], device=like.device).cumsum(0) - 1
        logits = like.new_empty(len(segments), decoder.config.vocab_size)
        decoder.logits(self._operands, a.x[ends], logits)
        return logits

    def _attend(
        self, layer: int, s: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """[L, Hq * D] of q [L, Hq, D]; k and v [L, Hkv, D] are kept, and those before them seen."""
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        self._cache.write(layer, s.slot, keys, values, s.start)
        mask = None
        if s.start:
            end = s.start + s.length
            keys, values = self._cache.read(layer, s.slot, end)
            mask = torch.ones(s.length, end, dtype=torch.bool, device=q.device).tril(s.start)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask,
            is_causal=mask is None, scale=self._decoder.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out[0].transpose(0, 1).reshape(s.length, -1)
