"""The ops of a pass in plain torch, over matrices whose parts lie in several tiers.

Knows neither rows nor slots; the order of the ops is the model's.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from dakrun.engine.expert_use import ExpertUse
from dakrun.kernels import reference
from dakrun.kernels.experts import reference as experts
from dakrun.models.decoder import Attend, Decoder
from dakrun.models.experts import Experts, Router
from dakrun.models.functional import layer_norm, rms_norm
from dakrun.models.modules import Attention, Embedding, Linear, Norm
from dakrun.weights.loading import Weights


class ReferenceBackend:
    """The ops of a pass over unpacked `weights`, each part read from its tier."""

    def __init__(self, model: Decoder, weights: Weights, use: ExpertUse | None = None) -> None:
        """`use` counts the experts that are chosen."""
        self._use = use
        self._eps, self._vectors = model.config.norm_eps, weights.resident
        self.matrices = weights.matrices

    def begin(self, n: int) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""

    def embed(
        self, embedding: Embedding, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [n, H] of tokens int64 [n] at positions int64 [n]."""
        x = reference.gather_rows(self.matrices[embedding.table.name], tokens)
        if embedding.project:
            x = self.linear(embedding.project, x)
        if embedding.positions:
            x = x + self._vectors[embedding.positions.name][positions + embedding.offset]
        return x

    def linear(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`linear` of x [n, K], with its norms, bias and activation."""
        if linear.norm:
            x = self._norm(linear.norm, x)
        y = reference.linear(x, self.matrices[linear.name], self._vectors.get(linear.bias_name))
        if linear.activation == "relu":
            y = F.relu(y)
        elif linear.activation == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        if residual is not None:
            y = residual + y
        return self._norm(linear.post_norm, y) if linear.post_norm else y

    def route(
        self, router: Router, norm: Norm, x: torch.Tensor
    ) -> tuple[torch.Tensor, experts.Chosen]:
        """norm(x) [n, H] of x [n, H], and the experts chosen for each of its rows."""
        x, bias = self._norm(norm, x), router.bias
        weight = self._vectors[router.weight.name]
        of_bias = None if bias is None else self._vectors[bias.name]
        indices = self._use.stack_indices(router) if self._use else router.stack_indices
        chosen = experts.route(x, weight, of_bias, router.routing, indices)
        if self._use:
            self._use.add(router, chosen.counts)
        return x, chosen

    def experts(
        self,
        module: Experts,
        x: torch.Tensor,
        chosen: experts.Chosen,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`module` of x by the choices of `route`: gated rows [n k, M / 2], or [n, H]."""
        weight = self.matrices[module.name]
        if residual is None:
            return experts.gate_up(x, chosen, weight, module.expert_rows)
        return experts.down(x, chosen, weight, residual)

    def _norm(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (
            self._vectors[operand.name] if operand else None for operand in (norm.weight, norm.bias)
        )
        if norm.kind == "rms":
            assert weight is not None, "an RMSNorm has a weight"
            return rms_norm(x, weight, self._eps)
        return layer_norm(x, weight, bias)


class TimedBackend:
    """A backend on the CPU that adds times of linear ops, experts and attention to `seconds`."""

    def __init__(self, backend: ReferenceBackend) -> None:
        self.begin, self.embed, self.end = backend.begin, backend.embed, backend.end
        self.route = backend.route
        self.seconds: dict[str, float] = defaultdict(float)
        self._backend = backend

    def linear(self, linear: Linear, *operands: Any) -> torch.Tensor:
        """The backend's `linear`, timed."""
        with self.timer(linear.op):
            return self._backend.linear(linear, *operands)

    def experts(self, experts: Experts, *operands: Any) -> torch.Tensor:
        """The backend's `experts`, timed."""
        with self.timer(experts.op):
            return self._backend.experts(experts, *operands)

    def timed(self, attend: Attend) -> Attend:
        """`attend`, timed."""

        def timed(attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
            with self.timer(attention.op):
                return attend(attention, qkv)

        return timed

    @contextmanager
    def timer(self, op: str) -> Iterator[None]:
        """Add the time of the block to those of `op`."""
        start = time.perf_counter()
        yield
        self.seconds[op] += time.perf_counter() - start
