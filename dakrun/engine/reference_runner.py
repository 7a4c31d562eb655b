"""The model in plain torch, one step at a time on any device: the reference, and the CPU's runner.

Knows partitioned matrices and slots; the order of the ops is the decoder's.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from dakrun.config import ModelConfig
from dakrun.engine.kv_cache import KVCache, RowLayout
from dakrun.engine.runner import Chosen, NextTokens, PromptPart, Row
from dakrun.geometry import KV_BLOCK
from dakrun.kernels import reference
from dakrun.models.architectures import Architecture, Norm
from dakrun.models.decoder import Attention, Decoder
from dakrun.models.layers import layer_norm, rms_norm, rope_table, rotate, split_heads
from dakrun.plan import PREFILL_CHUNK_TOKENS, Segment
from dakrun.units import ceil_div
from dakrun.weights.manifest import Weights

Rotations = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [N, 1, D / 2]


class ReferenceBackend:
    """The ops of a pass over unpacked `weights`, each part read from its tier."""

    def __init__(self, model: Architecture, weights: Weights) -> None:
        self._model, self._vectors = model, weights.resident
        self._steps = dict(model.step())
        self.matrices = weights.matrices

    def begin(self, n: int) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] of tokens int64 [n] at positions int64 [n]."""
        x = reference.gather_rows(self.matrices[self._model.table], tokens)
        if self._model.project_in:
            x = self.linear(self._model.project_in.op, x)
        if "positions" in self._vectors:
            x = x + self._vectors["positions"][positions + self._model.family.position_offset]
        return x

    def linear(
        self, name: str, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The matrix `name` applied to x [n, K], with its norms, bias and activation: [n, M]."""
        matrix = self._steps[name]
        layer = name.removesuffix(matrix.op)
        if matrix.norm:
            x = self._norm(layer, matrix.norm, x)
        y = reference.linear(x, self.matrices[name], self._vectors.get(f"{name}.bias"))
        if matrix.activation == "relu":
            y = F.relu(y)
        elif matrix.activation == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        if residual is not None:
            y = residual + y
        return self._norm(layer, matrix.post_norm, y) if matrix.post_norm else y

    def _norm(self, layer: str, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        vectors = [self._vectors.get(f"{layer}{norm.name}.{kind}") for kind in ("weight", "bias")]
        if norm.kind == "rms":
            assert vectors[0] is not None, "an RMSNorm has a weight"
            return rms_norm(x, vectors[0], self._model.config.norm_eps)
        return layer_norm(x, *vectors)


class TimedBackend:
    """A backend on the CPU that adds times of linear ops, attention and timers to `seconds`."""

    def __init__(self, backend: ReferenceBackend) -> None:
        self.begin, self.embed, self.end = backend.begin, backend.embed, backend.end
        self.seconds: dict[str, float] = defaultdict(float)
        self._backend = backend

    def linear(
        self, name: str, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The backend's `linear`, timed."""
        with self.timer(name.rpartition(".")[2]):
            return self._backend.linear(name, x, residual)

    def timed(self, attention: Attention) -> Attention:
        """`attention`, timed."""

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            with self.timer("attention"):
                return attention(layer, qkv)

        return attend

    @contextmanager
    def timer(self, op: str) -> Iterator[None]:
        """Add the time of the block to those of `op`."""
        start = time.perf_counter()
        yield
        self.seconds[op] += time.perf_counter() - start


class ReferenceAttention:
    """Attention of a pass over `segments`, each of one slot of `cache`.

    `rope` are the rotations of the pass's positions, or None for learned positions; `norms` has the
    weights of norms of query and key heads, of all layers, if there are any. The first `decode`
    segments are decode rows, of a single token.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        layout: RowLayout,
        segments: Sequence[Segment],
        rope: Rotations | None,
        norms: Mapping[str, torch.Tensor],
        *,
        decode: int,
    ) -> None:
        self._norms = norms
        self._config, self._cache, self._layout = config, cache, layout
        self._segments, self._rope, self._decode = segments, rope, decode
        self._scale = config.head_dim**-0.5

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Heads [n, Hq * D] of a fused projection [n, (Hq + 2 Hkv) * D], whose K, V are cached."""
        q, k, v = split_heads(self._config, qkv)
        if self._norms:
            weights = (self._norms[f"layers.{layer}.{kind}_norm.weight"] for kind in "qk")
            q, k = (
                rms_norm(heads, weight, self._config.norm_eps)
                for heads, weight in zip((q, k), weights, strict=True)
            )
        if self._rope is not None:
            q, k = rotate(q, *self._rope), rotate(k, *self._rope)
        q = q.contiguous()
        first = 0
        for s in self._segments:
            self._store(layer, s, *(x[first : first + s.length] for x in (k, v)))
            first += s.length
        caches = [self._cached(layer, s) for s in self._segments]
        n, found = self._decode, []
        if n:
            found.append(reference.decode_attention(q[:n], caches[:n], self._scale))
        parts = q[n:].split([s.length for s in self._segments[n:]])
        for part, cache in zip(parts, caches[n:], strict=True):
            found.append(reference.prefill_attention(part, cache, self._scale))
        return torch.cat(found)

    def _store(self, layer: int, s: Segment, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [T, Hkv, D] of a segment to its slot's blocks."""
        done = 0
        while done < s.length:
            number, row = divmod(s.start + done, KV_BLOCK)
            count = min(KV_BLOCK - row, s.length - done)
            block = self._layout.view(self._cache.block(s.slot, number)[layer])
            for part, new in zip(block, (keys, values), strict=True):
                part[row : row + count] = new[done : done + count]
            done += count

    def _cached(self, layer: int, s: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values [Hkv, P, D] of a slot's positions up to the segment's."""
        count = s.start + s.length
        found = self._cache.gather(layer, s.slot, ceil_div(count, KV_BLOCK))
        blocks = self._layout.view(found)
        keys, values = blocks.transpose(0, 1).flatten(1, 2)[:, :count].transpose(1, 2)
        return keys, values


class ReferenceRunner:
    """A runner in plain torch: a step is done when `launch` returns."""

    ahead = 1
    chunk_tokens = PREFILL_CHUNK_TOKENS

    def __init__(
        self,
        model: Architecture,
        weights: Weights,
        cache: KVCache,
        layout: RowLayout,
        max_model_len: int,
    ) -> None:
        self.order: Sequence[int] = range(cache.slots)
        self._model, self.cache, self._layout = model, cache, layout
        self._device = cache.device
        backend = ReferenceBackend(model, weights)
        self._timed = TimedBackend(backend) if cache.device.type == "cpu" else None
        self.weights = weights
        self._prefill = Decoder(model, backend)
        self._decode = Decoder(model, self._timed or backend)
        self._head_norms = {name: weights.resident[name] for name, _ in model.head_norms()}
        self._rope: Rotations | None = None
        if model.family.rotary:
            dtype = getattr(torch, model.config.dtype)
            cos, sin = rope_table(model.config, max_model_len, dtype)
            self._rope = cos.to(cache.device), sin.to(cache.device)
        self._steps = 0
        self._newest: dict[int, int] = {}  # token by slot
        self._chosen: deque[NextTokens] = deque()  # by step

    def op_seconds(self, length: int) -> Mapping[str, float]:
        """Seconds by op, the mean of all steps so far, on a CPU."""
        del length
        found = self._timed.seconds if self._timed else {}
        return {op: total / self._steps for op, total in found.items()}

    def details(self) -> dict[str, Any]:
        """No further facts."""
        return {}

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row], parts: Sequence[PromptPart] = ()) -> None:
        """Compute a step."""
        tokens = [self._newest[row.slot] for row in rows]
        segments = [Segment(row.slot, row.position, 1) for row in rows]
        wanted, chosen = list(range(len(rows))), list(rows)
        for part in parts:
            tokens += part.tokens
            segments.append(Segment(part.row.slot, part.start, len(part.tokens)))
            if part.ends:
                wanted.append(len(tokens) - 1)
                chosen.append(part.row)
        logits = self.logits(tokens, segments, len(rows), wanted)
        timed = self._timed if not parts else None
        self._steps += not parts
        with timed.timer("sampling") if timed else nullcontext():
            found = Chosen(logits, chosen).collect() if chosen else NextTokens([])
        self._chosen.append(found)
        for row, token in zip(chosen, found.tokens, strict=True):
            self._newest[row.slot] = max(token, 0)  # NO_TOKEN has no embedding

    def resume(self, row: Row, token: int) -> None:
        """Let `token` be the newest of the row's slot."""
        self._newest[row.slot] = token

    def collect(self) -> NextTokens:
        """The tokens of the oldest step."""
        return self._chosen.popleft()

    def drop(self) -> None:
        """Forget the tokens of all steps."""
        self._chosen.clear()

    @torch.inference_mode()
    def logits(
        self, tokens: Sequence[int], segments: Sequence[Segment], decode: int, wanted: Sequence[int]
    ) -> torch.Tensor:
        """Logits [S, V] after the tokens numbered `wanted` of a pass over `segments`.

        The first `decode` segments are decode rows.
        """
        positions = [p for s in segments for p in range(s.start, s.start + s.length)]
        at, ids = (torch.tensor(numbers, device=self._device) for numbers in (positions, tokens))
        rope = None if self._rope is None else (self._rope[0][at, None], self._rope[1][at, None])
        attention: Attention = ReferenceAttention(
            self._model.config,
            self.cache,
            self._layout,
            segments,
            rope,
            self._head_norms,
            decode=decode,
        )
        if len(wanted) == len(tokens) == decode:  # a decode step without prompts
            if self._timed:
                attention = self._timed.timed(attention)
            return self._decode.forward(ids, at, attention)
        rows = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        return self._prefill.forward(ids, at, attention, rows)
