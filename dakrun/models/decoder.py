"""The forward pass of a decoder-only model, straight down through its layers.

Knows the architecture's matrices by name, neither dtypes nor devices nor tiers. A `Backend`
computes them; an `Attention` reads the KV cache and appends to it.
"""

from typing import Protocol

import torch

from dakrun.models.architectures import Architecture


class Backend(Protocol):
    """Computes the ops of a pass over n tokens."""

    def begin(self, n: int) -> None:
        """Start a pass of `n` tokens."""
        ...

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] of tokens [n] at positions [n]."""
        ...

    def linear(
        self, name: str, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The matrix `name` applied to x [n, K], with its norms, bias and activation: [n, M].

        `residual` [n, M] is added, and may be overwritten with the result.
        """
        ...

    def end(self) -> None:
        """End a pass, after its last launch."""
        ...


class Attention(Protocol):
    """Attention of a pass's tokens to their requests' caches and to themselves."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Heads [n, Hq * D] of a fused projection [n, (Hq + 2 Hkv) * D], whose K, V are cached.

        Applies the family's norms of query and key heads, and RoPE; may overwrite.
        """
        ...


class Decoder:
    """The forward pass of `model`, whose ops `backend` computes."""

    def __init__(self, model: Architecture, backend: Backend) -> None:
        self.model, self.backend = model, backend

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [n, V] after tokens [n] at positions [n], or after those numbered `rows` alone."""
        linear = self.backend.linear
        qkv, o, up, down = (matrix.op for matrix in self.model.layer)
        self.backend.begin(len(tokens))
        x = self.backend.embed(tokens, positions)
        for i in range(self.model.config.num_layers):
            heads = attention(i, linear(f"layers.{i}.{qkv}", x))
            x = linear(f"layers.{i}.{o}", heads, residual=x)
            x = linear(f"layers.{i}.{down}", linear(f"layers.{i}.{up}", x), residual=x)
        if rows is not None:
            x = x[rows]
        if self.model.project_out:
            x = linear(self.model.project_out.op, x)
        logits = linear(self.model.head.op, x)
        self.backend.end()
        return logits
