"""What OPT and Llama share: the decoder's frame, norms, rotary embeddings.

A decoder computes on one dtype and device and reads its operands wherever the plan put them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from dakrun.config import ModelConfig
from dakrun.kernels import reference
from dakrun.memory.tiers import PartitionedTensor
from dakrun.plan.segments import Segment
from dakrun.weights.checkpoint import Manifest, Source, Weights

KeysValues = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Cache(Protocol):
    """Where a decoder keeps keys and values."""

    def keys_values(self, layer: int, slot: int) -> KeysValues:
        """Keys and values [Hkv, P, D] of one layer and slot, for reading and writing."""
        ...


class Decoder(ABC):
    """A decoder-only model over partitioned weights.

    `op_seconds` collects the time of every kind of op over all decode steps, on the CPU.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.scale = config.head_dim**-0.5
        self.op_seconds: dict[str, float] = {}
        self._timed = False

    @staticmethod
    @abstractmethod
    def manifest(config: ModelConfig, has: Callable[[str], bool]) -> Manifest:
        """The checkpoint tensors of `config`; `has` tells whether the checkpoint has a name."""

    def prefill(
        self, tokens: torch.Tensor, segments: Sequence[Segment], cache: Cache
    ) -> torch.Tensor:
        """Run the concatenated tokens [T] of all segments; returns hidden states [T, H]."""
        self._timed = False
        starts = [range(s.start, s.start + s.length) for s in segments]
        positions = torch.tensor([p for span in starts for p in span], device=tokens.device)
        lengths = [s.length for s in segments]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pieces = zip(
                segments, q.split(lengths), k.split(lengths), v.split(lengths), strict=True
            )
            outputs = []
            for s, q_new, k_new, v_new in pieces:
                kv = cache.keys_values(layer, s.slot)
                outputs.append(
                    reference.prefill_attention(q_new, k_new, v_new, kv, s.start, self.scale)
                )
            return torch.cat(outputs)

        return self._hidden(tokens, positions, attend)

    def decode(
        self, tokens: torch.Tensor, positions: Sequence[int], slots: Sequence[int], cache: Cache
    ) -> torch.Tensor:
        """One step: token b [B] of slots[b] enters at positions[b]; returns logits [B, V]."""
        self._timed = tokens.device.type == "cpu"

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            caches = [cache.keys_values(layer, slot) for slot in slots]
            return reference.decode_attention(q, k, v, caches, positions, self.scale)

        where = torch.tensor(positions, device=tokens.device)
        return self.logits(self._hidden(tokens, where, attend))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states [N, H]."""
        return self.linear("lm_head", hidden)

    @abstractmethod
    def _hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Hidden states [N, H], after the last norm, of tokens [N] at positions [N]."""

    def linear(self, op: str, x: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        """Apply the matrix of `op`, with its bias where the model has one."""
        name = op if layer is None else f"layers.{layer}.{op}"
        start = time.perf_counter()
        y = reference.linear(x, self._matrix(name), self.weights.resident.get(f"{name}.bias"))
        self._record(op, start)
        return y

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [N, E] of the embedding table, which is the lm_head's matrix where they are tied."""
        name = "lm_head" if self.config.tied_embeddings else "embedding"
        return reference.gather_rows(self._matrix(name), tokens)

    def attention(self, qkv: torch.Tensor, attend: Attend, rope: KeysValues | None) -> torch.Tensor:
        """Attention [N, Hq * D] of a fused projection [N, (Hq + 2 Hkv) * D]."""
        c = self.config
        start = time.perf_counter()
        heads = qkv.view(qkv.shape[0], c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        out = attend(q.contiguous(), k, v)
        self._record("attention", start)
        return out

    def _matrix(self, name: str) -> PartitionedTensor:
        matrix = self.weights.matrices[name]
        assert isinstance(matrix, PartitionedTensor), f"{name} is packed"
        return matrix

    def _record(self, op: str, start: float) -> None:
        if self._timed:
            seconds = time.perf_counter() - start
            self.op_seconds[op] = self.op_seconds.get(op, 0.0) + seconds


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, in float32, rounded before the weight is applied."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """LayerNorm over the last dimension with torch's default eps, as OPT uses it."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rope_table(config: ModelConfig, positions: int, dtype: torch.dtype) -> KeysValues:
    """Cosines and sines [positions, D / 2] of the rotary embedding.

    Frequencies and their llama3 scaling follow Su et al. (arXiv 2104.09864) and Meta's Llama 3.1
    reference: long wavelengths are divided by `factor`, short ones kept, those between blended.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        s = config.rope_scaling
        turns = s.original_max_positions * frequencies / (2 * torch.pi)
        blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        blend = blend.clamp(0, 1)
        frequencies = (1 - blend) * frequencies / s.factor + blend * frequencies
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [N, H, D] by cosines and sines [N, 1, D / 2]; halves are partners."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def stacked(*parts: tuple[str, int], cols: int) -> tuple[Source, ...]:
    """Sources of a matrix that stacks tensors of the given rows and `cols` columns."""
    return tuple((name, (rows, cols)) for name, rows in parts)


def vectors(*parts: tuple[str, int]) -> tuple[Source, ...]:
    """Sources of a vector that joins vectors of the given lengths."""
    return tuple((name, (length,)) for name, length in parts)
