"""OPT and Llama on the GPU's kernels: one forward pass for decode steps and for prompts.

Knows operands as packed tensors and where activations go; attention is the caller's, who has the
cache. Norms that precede a matrix are folded into it (dakrun.weights.loading), so a product needs
no more than the scale of its rows.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, Protocol

import torch

from dakrun.config import ModelConfig
from dakrun.hardware.profile import LOCAL
from dakrun.kernels.embed import embed
from dakrun.kernels.gemm.dispatch import By, Products
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.gemm.splitk import Activation, Norm
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.kernels.normalize import normalize
from dakrun.models.layers import rope_table
from dakrun.models.opt import POSITION_OFFSET
from dakrun.weights.checkpoint import Manifest, Weights

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]


class Operands(Protocol):
    """Where a pass finds its matrices."""

    def fill(self) -> None:
        """Bring what a pass leaves for the next one; others may have overwritten it."""
        ...

    def begin(self) -> None:
        """Say that a pass begins."""
        ...

    def end(self) -> None:
        """Say that all of a pass that uses them is launched."""
        ...

    def fetch(self, name: str) -> PackedTensor:
        """The matrix `name`, to be read by what is launched from now on until `release`."""
        ...

    def release(self, name: str) -> None:
        """Say that all that reads the matrix `name` is launched."""
        ...

    def overlaps(self, name: str) -> bool:
        """Whether a launch that reads it may start while the kernel before it ends."""
        ...


class Resident:
    """Matrices that are read where they lie."""

    def __init__(self, matrices: Mapping[str, PackedTensor]) -> None:
        self._matrices = matrices

    def fill(self) -> None:
        """Nothing to do."""

    def begin(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""

    def fetch(self, name: str) -> PackedTensor:
        """The matrix itself."""
        return self._matrices[name]

    def release(self, name: str) -> None:
        """Nothing to do."""

    def overlaps(self, name: str) -> bool:
        """Always: no kernel writes it."""
        del name
        return True


@dataclass(frozen=True)
class Activations:
    """What a pass over n rows writes: `x` [n, H], and what the ops of a layer hand on."""

    x: torch.Tensor
    qkv: torch.Tensor
    heads: torch.Tensor
    ffn: torch.Tensor

    @classmethod
    def empty(cls, config: ModelConfig, n: int, like: torch.Tensor) -> "Activations":
        """For `n` rows, of the dtype and on the device of `like`."""
        widths = (config.hidden_size, config.q_size + 2 * config.kv_size, config.q_size)
        return cls(*(like.new_empty(n, width) for width in (*widths, config.ffn_size)))

    def first(self, n: int) -> "Activations":
        """The first `n` rows."""
        return Activations(*(getattr(self, field.name)[:n] for field in fields(self)))


class KernelDecoder:
    """A decoder-only model over packed weights, whose tiers are read as `accesses` says by op.

    `positions` is how many there can be of a slot, in whole blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        manifest: Manifest,
        weights: Weights,
        accesses: Mapping[str, tuple[TierAccess, ...]],
        positions: int,
    ) -> None:
        self.config = config
        self.resident = weights.resident
        self.matrices: dict[str, PackedTensor] = {}
        for name, matrix in weights.matrices.items():
            assert isinstance(matrix, PackedTensor), f"{name} is not packed"
            self.matrices[name] = matrix
        self.scale = config.head_dim**-0.5
        self._folded, self._accesses = manifest.folded, accesses
        llama = config.family == "llama"
        self._norm: Literal["rms", "layer"] = "rms" if llama else "layer"
        self._eps = config.norm_eps
        self._ffn_ops = ("gate_up", "down") if llama else ("fc1", "fc2")
        self._activation: Activation = "silu_mul" if llama else "relu"
        self.like = next(iter(weights.resident.values()))  # for the dtype and the device
        self._products = Products(self.like.device)
        self._products.reserve()
        self._following = dict(itertools.pairwise(self.order))
        self.rotations = None
        if llama:
            table = torch.stack(rope_table(config, positions, torch.float32), -1)
            self.rotations = table.to(self.like.device)  # float32 [positions, D / 2, 2]

    @property
    def order(self) -> list[str]:
        """The matrices that are fetched for a step, in the order of their use."""
        layers = range(self.config.num_layers)
        names = [f"layers.{i}.{op}" for i in layers for op in ("qkv", "o", *self._ffn_ops)]
        return [*names, *(["project_out"] if "project_out" in self.matrices else []), "lm_head"]

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, x: torch.Tensor) -> None:
        """x [n, H] of tokens int32 [n] at `positions` int32 [n], where negative ones are idle."""
        table = self.matrices["lm_head" if self.config.tied_embeddings else "embedding"]
        learned = self.resident.get("positions")
        if "project_in" in self.matrices:
            words = x.new_empty(len(x), table.shape[1])
            embed(tokens, table, words)
            assert learned is not None, "OPT has learned positions"
            added = learned[positions.clamp(min=0).long() + POSITION_OFFSET]
            self.linear(Resident(self.matrices), "project_in", words, x, residual=added, pdl=False)
        elif learned is None:
            embed(tokens, table, x, pdl=True)
        else:
            embed(
                tokens, table, x, positions=learned, lengths=positions, offset=POSITION_OFFSET,
                pdl=True,
            )  # fmt: skip

    def ops(
        self, operands: Operands, a: Activations, attend: Attend
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """What takes a.x through all layers, in place, launch by launch under the op's name.

        `attend(layer, qkv, heads)` fills `heads`. Norms that are not folded go with the op before.
        """
        up, down = self._ffn_ops

        def added(name: str, x: torch.Tensor, norm: str) -> None:
            self.linear(operands, name, x, a.x, residual=a.x)
            if not self.config.pre_norm:
                self._normalize(norm, a.x, a.x)

        for i in range(self.config.num_layers):
            name = f"layers.{i}"
            yield "qkv", partial(self.linear, operands, f"{name}.qkv", a.x, a.qkv, pdl=i > 0)
            yield "attention", partial(attend, i, a.qkv, a.heads)
            yield "o", partial(added, f"{name}.o", a.heads, f"{name}.attention_norm")
            yield (
                up,
                partial(
                    self.linear,
                    operands,
                    f"{name}.{up}",
                    a.x,
                    a.ffn,
                    activation=self._activation,
                ),
            )
            yield down, partial(added, f"{name}.{down}", a.ffn, f"{name}.ffn_norm")

    def by(self, n: int) -> By:
        """What computes most products of `n` rows."""
        return self._products.by(n, self.matrices["layers.0.qkv"])

    def fills_sms(self, n: int) -> bool:
        """Whether CTAs of the products of `n` rows have an SM each."""
        return self.by(n) == "tiled"

    def logits(self, operands: Operands, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [n, V] of what the layers left in x [n, H]."""
        alone = self.config.final_norm and "lm_head" not in self._folded
        if alone:
            name = "norm" if self.config.family == "llama" else "final_norm"
            x = self._normalize(name, x, torch.empty_like(x))
        if "project_out" in self.matrices:
            narrow = x.new_empty(len(x), self.config.embed_size)
            self.linear(operands, "project_out", x, narrow, pdl=not alone)
            x, alone = narrow, False
        self.linear(operands, "lm_head", x, out, pdl=not alone)

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q [n, Hq, D], k and v [n, Hkv, D] of a fused projection [n, (Hq + 2 Hkv) * D]."""
        c = self.config
        heads = qkv.view(len(qkv), c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        return heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)

    def linear(
        self,
        operands: Operands,
        name: str,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        activation: Activation = "none",
        residual: torch.Tensor | None = None,
        pdl: bool = True,
    ) -> None:
        """out [n, M] = activation(norm(x) W^T + bias) + residual, with the norm that W has folded.

        `out` may be `residual`. Without `pdl` it starts when the kernel before it has ended.
        That has to be so after small kernels that leave SMs empty: the GPU would put two CTAs of
        this one there and none elsewhere, and those of all that follow where they leave room.
        """
        weight, bias = operands.fetch(name), self.resident.get(f"{name}.bias")
        norm: Norm = self._norm if name in self._folded else "none"
        self._products(
            x, weight, self._tier_accesses(name, weight), out, bias=bias, residual=residual,
            activation=activation, norm=norm, eps=self._eps,
            pdl=pdl and operands.overlaps(name), ahead=self._ahead(operands, name, len(x)),
        )  # fmt: skip
        operands.release(name)

    def _tier_accesses(self, name: str, weight: PackedTensor) -> tuple[TierAccess, ...]:
        """How the parts of `weight` are read, the matrix `name` or what stands in for it."""
        return tuple(
            TierAccess() if part.tier == LOCAL else access
            for part, access in zip(weight.parts, self._accesses[name.split(".")[-1]], strict=True)
        )

    def _ahead(self, operands: Operands, name: str, n: int) -> torch.Tensor | None:
        """What L2 is to bring of the matrix behind `name`, unless it is staged."""
        following = self._following.get(name)
        if following is None or not operands.overlaps(following):
            return None
        weight = self.matrices[following]
        return self._products.ahead(n, weight, self._tier_accesses(following, weight))

    def _normalize(self, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The norm `name` of the rows of x, for norms that no matrix has folded."""
        named = name if self._norm == "rms" else f"{name}.weight"
        # What is behind a final norm does not overlap, and many rows' CTAs have an SM each.
        fills_sms = not self.config.pre_norm and not self.fills_sms(len(x))
        return normalize(
            x, out, self._norm, eps=self._eps, weight=self.resident.get(named),
            bias=self.resident.get(f"{name}.bias"), pdl=True, fills_sms=fills_sms,
        )  # fmt: skip
