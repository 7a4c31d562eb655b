"""Prefill on the GPU: prompts through the layers, their keys and values into KV blocks.

Knows a step's parts of prompts, which may share the pass with decode rows. The backend computes
products. Attention of a prompt's first part runs on torch's fused kernel, attention of parts behind
cached positions on the project's. kv_writer.py stores keys and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F

from dakrun.engine.cached_attention import CachedAttention
from dakrun.engine.decode_step import StepRows
from dakrun.engine.kernel_backend import KernelBackend
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.kv_writer import KVWriter
from dakrun.engine.logprobs import Scores
from dakrun.engine.step import Row, Step
from dakrun.kernels.attention import KVShape
from dakrun.memory.device import upload
from dakrun.models.decoder import Attend
from dakrun.models.modules import Attention


class Prefill:
    """Runs prompts of a model whose slots are in `cache`, in passes of up to `chunk_tokens`.

    `room`, uint8 in HBM, holds keys and values of remote slots until they are copied to the slots.
    """

    def __init__(
        self,
        backend: KernelBackend,
        cache: KVCache,
        shape: KVShape,
        room: torch.Tensor,
        chunk_tokens: int,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._backend, self._cache, self._shape = backend, cache, shape
        self._scoring: KernelBackend | None = None  # for the head alone, which nothing stages
        self._heads = backend.like.new_empty(backend.rows, backend.model.config.q_size)
        self._writer = KVWriter(cache, shape, room)

    def logits(
        self,
        parts: Sequence[Row],
        rows: StepRows | None = None,
        logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [S, V] after the wanted tokens of `parts` of prompts.

        The tokens of a decode step's `rows` go through the layers with them; their logits come
        first. `logits` is room for them all, by default it is allocated. Also returns the last
        layer's output [T, H] after all tokens of `parts`, for `scores`.
        """
        n = len(rows.ids) if rows else 0
        backend, device = self._backend, self._backend.like.device
        spans = [torch.arange(row.start, row.start + row.length) for row in parts]
        positions = upload(torch.cat(spans).int(), device)
        tokens = [token for row in parts for token in row.tokens]
        ids = upload(torch.tensor(tokens, dtype=torch.int32), device)
        wanted, end = list[int](), n
        for row in parts:
            end += row.length
            wanted += range(end - row.wanted, end)
        chosen = torch.cat((torch.arange(n), torch.tensor(wanted, dtype=torch.int64)))
        heads = self._heads[: n + len(positions)]
        attend: Attend = _PassAttention(
            backend, self._cache, self._shape, self._writer, parts, positions, heads[n:]
        )
        if rows:
            attend = _both(n, rows.attend(heads[:n]), attend, heads)
            ids, positions = torch.cat((rows.ids, ids)), torch.cat((rows.positions, positions))
        backend.begin(len(ids), logits)
        hidden = backend.model.hidden(backend, attend, ids, positions)
        found = backend.model.logits(backend, hidden[upload(chosen, device)])
        self._writer.end()
        return found, hidden[n:]

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest pass, those of rows included."""
        return self._backend.rows

    def stages_experts(self, tokens: int) -> bool:
        """Whether a pass of `tokens` tokens reads copies of experts."""
        return self._backend.stagings.has_experts(tokens)

    def scores(self, step: Step, hidden: torch.Tensor) -> Scores:
        """Start to compute the log-probabilities of a step's `scored` tokens, from `logits`."""
        model = self._backend.model
        run = self._scoring = self._scoring or self._backend.for_logits()

        def logits_of(x: torch.Tensor) -> torch.Tensor:
            run.begin(len(x))
            return model.logits(run, x)

        return Scores(step, hidden, logits_of, len(run.logits))


def _both(n: int, rows: Attend, prompts: Attend, heads: torch.Tensor) -> Attend:
    """Attention of n decode `rows`, then of `prompts`; both write their part of `heads`."""

    def attend(attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        rows(attention, qkv[:n])
        prompts(attention, qkv[n:])
        return heads

    return attend


class _PassAttention:
    """Attention of a pass: stores new keys and values, attends to them and to cached ones."""

    def __init__(
        self,
        backend: KernelBackend,
        cache: KVCache,
        shape: KVShape,
        writer: "KVWriter",
        parts: Sequence[Row],
        positions: torch.Tensor,
        heads: torch.Tensor,
    ) -> None:
        """`heads` [tokens, Hq * D] is overwritten by each layer's output."""
        self._backend, self._writer, self._positions = backend, writer, positions
        self._runs = list(_runs(parts, backend.like.device))
        self._heads = heads
        written = writer.begin(parts)
        self._cached = CachedAttention(backend.model.config, cache, shape, parts, written)

    def __call__(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """Heads [n, Hq * D] of a fused projection [n, (Hq + 2 Hkv) * D]; rotates q and k in it."""
        layer = attention.layer
        self._backend.normalize_heads(attention, qkv)
        q, k, v = attention.split(qkv)
        joined = qkv.view(len(qkv), -1, attention.head_dim)
        self._writer.store(layer, joined, self._positions, self._backend.rotations)
        for rows, lengths in self._runs:
            found = causal_attention(
                q[rows], k[rows], v[rows], lengths, lengths, scale=attention.scale
            )
            self._heads[rows] = found.flatten(1)
        self._cached(layer, q, self._heads)
        return self._heads


def _runs(parts: Sequence[Row], device: torch.device) -> Iterator[tuple[slice, "Lengths"]]:
    """Neighbours that begin a prompt: the numbers of their tokens in `parts`, and their lengths."""
    first = 0
    for begins, group in groupby(parts, lambda row: row.start == 0):
        lengths = [row.length for row in group]
        rows = slice(first, first + sum(lengths))
        if begins:
            yield rows, Lengths.of(lengths, device)
        first = rows.stop


@dataclass(frozen=True)
class Lengths:
    """Lengths `each` of concatenated prompts; `ends`, int32 [prompts + 1], are their prefix sums.

    The first of `ends` is 0; they are on the device.
    """

    each: tuple[int, ...]
    ends: torch.Tensor

    @classmethod
    def of(cls, each: Sequence[int], device: torch.device) -> "Lengths":
        """Lengths `each`, with the ends on `device`."""
        ends = torch.tensor([0, *accumulate(each)], dtype=torch.int32)
        return cls(tuple(each), upload(ends, device))


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention [T, Hq, D] of q [T, Hq, D], k and v [P, Hkv, D], all of concatenated prompts.

    The queries of a prompt are its last positions; each sees the keys up to its own. Allocates
    the result and one float per query and head.
    """
    if queries is keys and len(queries.each) > 1 and len(set(queries.each)) == 1:
        own, first, last = (
            x.unflatten(0, (len(queries.each), -1)).transpose(1, 2) for x in (q, k, v)
        )
        same = F.scaled_dot_product_attention(
            own, first, last, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return same.transpose(1, 2).flatten(0, 1)
    if not q.is_cuda:
        return _reference(q, k, v, queries.each, keys.each, scale)
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.ends, keys.ends, max(queries.each), max(keys.each),
        0.0, True, False, scale=scale,
    )  # fmt: skip
    return found[0]


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """causal_attention in plain torch on any device, prompt by prompt."""
    out = []
    for own, first, last in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        length, end = len(own), len(first)
        mask = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(end - length)
        found = F.scaled_dot_product_attention(
            own.transpose(0, 1)[None], first.transpose(0, 1)[None], last.transpose(0, 1)[None],
            attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        out.append(found[0].transpose(0, 1))
    return torch.cat(out)
