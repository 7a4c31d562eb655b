"""The ops of a pass on the GPU's kernels, over packed weights in several tiers.

Knows how each tier is read, and which matrices are staged; the order of the ops is the model's.
Norms ahead of a matrix are folded into it where its module says so (weights/loading.py), so that a
product only scales rows. A norm between two quantised matrices is, for few rows, a part of both
products (norms_between.py). All other norms ahead of quantised matrices are launches of their own.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from dakrun.engine.expert_copies import ExpertTables
from dakrun.engine.expert_use import DECODE, PROMPTS, ExpertUse
from dakrun.engine.norms_between import NormsBetween
from dakrun.engine.staging import PassStaging, Staging
from dakrun.hardware import LOCAL
from dakrun.kernels import HeadNorms, embed, normalize, normalize_heads
from dakrun.kernels.experts.dispatch import Choices, ExpertProducts
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import card_of
from dakrun.launches import By, TierAccess
from dakrun.memory.matrix import TieredMatrix
from dakrun.models.decoder import Decoder
from dakrun.models.experts import Experts, Router, routers
from dakrun.models.functional import rope_table
from dakrun.models.modules import Attention, Embedding, Linear, Norm
from dakrun.models.operands import Operand
from dakrun.weights.loading import Weights

# Each matrix of a pass, its remote rows in a ring if they are staged, and how kernels read it.
Operands = dict[str, tuple[TieredMatrix, tuple[TierAccess, ...]]]


class KernelBackend:
    """The ops of a model on packed weights; `accesses` says how each tier is read, by op.

    `rotations`, float32 [positions, D / 2, 2], are cosines and sines of rotary embeddings, or None.
    """

    def __init__(
        self,
        model: Decoder,
        weights: Weights,
        accesses: Mapping[str, tuple[TierAccess, ...]],
        positions: int,
    ) -> None:
        """`positions` is the capacity of a slot. No matrix is staged (see `with_buffers`)."""
        self.model = model
        self.matrices: Mapping[str, TieredMatrix] = weights.matrices
        assert all(matrix.for_kernels for matrix in self.matrices.values()), "weights are packed"
        self.stagings = PassStaging()
        self.staging: Staging | None = None  # of this pass
        self.like = next(iter(weights.resident.values()))  # for the dtype and the device
        self._vectors, self._accesses = weights.resident, accesses
        # The modules of a pass that may be staged, in the order of their use.
        self.order: list[Linear | Experts] = [
            module
            for module in model.modules()
            if isinstance(module, Linear | Experts) and module is not model.embedding.project
        ]
        self._following = {
            a.name: b.name for a, b in itertools.pairwise(self.order) if isinstance(b, Linear)
        }
        self._products = Products(self.like.device, card_of(self.like.device))
        self._products.reserve()
        self._norms = NormsBetween(
            self.order, self.matrices, self._vectors, self._products.can_scale
        )
        device = self.like.device
        self.expert_use = ExpertUse(model, device) if routers(model) else None
        self._kind = DECODE  # of steps in which experts are counted
        self.expert_tables: ExpertTables | None = None  # of experts that may be exchanged
        self._stacked = {
            router.weight.name: torch.tensor(router.stack_indices, dtype=torch.int32, device=device)
            for router in routers(model)
            if router.stack_indices
        }
        if self.expert_use and any(
            part.split.row_blocks
            for mixture in self.expert_use.mixtures
            for one in (mixture.up, mixture.down)
            for part in self.matrices[one.name].parts[1:]
        ):
            self._make_tables(self.expert_use)
        self._experts: ExpertProducts | None = None  # of passes for which buffers are kept
        self._passing: ExpertProducts | None = None  # of this pass
        self._kept: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._logits: torch.Tensor | None = None  # lent for those of this pass
        self._pdl = False  # whether the next product may launch with PDL
        self._operands_by: dict[Staging | None, Operands] = {None: self._read_by(None)}
        self._operands = self._operands_by[None]
        self.rotations = None
        if any(attention.rotary for attention in model.attentions):
            table = torch.stack(rope_table(model.config, positions, torch.float32), -1)
            # Rows of a head that RoPE does not rotate are behind the others (HeadOrder).
            still = model.config.head_dim // 2 - table.shape[1]
            table = torch.cat((table, torch.tensor([1.0, 0.0]).expand(positions, still, 2)), 1)
            self.rotations = table.to(self.like.device)

    def with_buffers(
        self,
        rows: int,
        stagings: PassStaging | None = None,
        *,
        logits: bool = True,
        prompts: bool = False,
    ) -> "KernelBackend":
        """A copy of this backend whose matrices are staged by `stagings`, or not at all.

        Passes of up to `rows` tokens write to buffers that stay allocated: CUDA graphs need them,
        and the memory used does not depend on the order of passes. Without `logits` there is no
        such buffer for the logits. Experts are counted as those of decode steps, or of steps with
        `prompts`.
        """
        found = self.staged_by(stagings or PassStaging())
        found._kind = PROMPTS if prompts else DECODE
        found._kept = self._allocate(rows, logits=logits)
        found._experts = found._expert_products(rows)
        found._norms = self._norms.with_rows(rows)
        return found

    def staged_by(self, stagings: PassStaging) -> "KernelBackend":
        """A copy with the same kept buffers, for passes whose matrices `stagings` stages."""
        found = copy.copy(self)
        found.stagings, found.staging, found._buffers = stagings, None, {}
        found._operands_by = {
            staging: self._read_by(staging) for staging in {stagings.most, stagings.few}
        }
        return found

    def for_logits(self) -> "KernelBackend":
        """A copy that stages no matrix and computes logits between passes of this one.

        They are written to the largest of the kept buffers that hold nothing then.
        """
        found, width = self.staged_by(PassStaging()), self.model.head.width
        idle = max((kept for op, kept in self._kept.items() if op != "x"), key=torch.numel)
        if (rows := idle.numel() // width) == 0:
            idle, rows = self.like.new_empty(1, width), 1
        logits = idle.view(-1)[: rows * width].view(rows, width)
        found._kept = {**self._kept, self.model.head.op: logits}
        return found

    @property
    def rows(self) -> int:
        """Tokens of the largest pass for which the kept buffers have room."""
        return len(self._kept["x"])

    @property
    def logits(self) -> torch.Tensor:
        """The kept buffer of logits [rows, V]."""
        return self._kept[self.model.head.op]

    def begin(self, n: int, logits: torch.Tensor | None = None) -> None:
        """Start a pass of `n` tokens, and copies of the matrices that are staged first.

        With `logits` [rows, V] the pass writes its logits there.
        """
        self._logits = logits
        kept = self._kept and n <= self.rows
        self._buffers = self._kept if kept else self._allocate(n)
        self.staging = self.stagings.of(n)
        self._operands = self._operands_by[self.staging]
        if self.staging:
            self.staging.begin()

    def end(self) -> None:
        """End a pass: later launches wait for its copies."""
        if self.staging:
            self.staging.end()
        self._buffers, self._logits = {}, None

    def embed(
        self, embedding: Embedding, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [n, H] of tokens int32 [n]; idle rows have negative positions int32 [n]."""
        n, table = len(tokens), self.matrices[embedding.table.name]
        learned, offset = self._vector(embedding.positions), embedding.offset
        self._positions = positions
        self._pdl = False
        if embedding.project:
            words = self.like.new_empty(n, table.shape[1])
            embed(tokens, table, words)
            assert learned is not None, "a family with projected embeddings has learned positions"
            added = learned[positions.clamp(min=0).long() + offset]
            x = self.linear(embedding.project, words, residual=added)
            self._pdl = False
            return x
        x = self._buffers["x"][:n]
        if learned is None:
            embed(tokens, table, x, pdl=True)
        else:
            embed(tokens, table, x, positions=learned, lengths=positions, offset=offset, pdl=True)
        return x

    def linear(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`linear` of x [n, K], with its norms, bias and activation.

        The result overwrites `residual`. The launch may start while the kernel before it ends
        (PDL), but not behind a small kernel that leaves SMs empty: the GPU would put two CTAs of
        this launch on one SM, and the CTAs of later launches unevenly on the others. Nor behind a
        norm without a launch, where attention gets some SMs twice (holds_up_attention).
        """
        name, staging = linear.name, self.staging
        if (scaled := self._norms.read(linear, x)) is not None:
            x = scaled.rows
            weight, _ = self._operands[name]
            self._pdl = self._pdl and not self._products.holds_up_attention(len(x), weight)
        elif linear.norm and not linear.folded:
            x = self._normalize(linear.norm, x, torch.empty_like(x))
            self._pdl = False
        out = self._out(linear, len(x)) if residual is None else residual
        if staging:
            staging.fetch(name)
        self._products(
            x, *self._operands[name], out, bias=self._vectors.get(linear.bias_name),
            residual=residual, activation=linear.activation,
            norm=linear.folded.kind if linear.folded else "none", eps=self.model.config.norm_eps,
            pdl=self._pdl and not (staging and staging.waits(name)),
            ahead=self._ahead(name, len(x)), scaled=scaled, scales=self._norms.write(linear, out),
        )  # fmt: skip
        if staging:
            staging.release(name)
        self._pdl = True
        if linear.post_norm:
            self._normalize(linear.post_norm, out, out, pad_grid=not self.one_cta_per_sm(len(x)))
        return out

    def route(self, router: Router, norm: Norm, x: torch.Tensor) -> tuple[torch.Tensor, Choices]:
        """norm(x) [n, H] of x [n, H], and the experts chosen for each of its rows; idle rows: none.

        The norm is a launch of its own, since router and experts read the same rows.
        """
        products = self._experts if self._buffers is self._kept else None
        self._passing = products or self._expert_products(len(x))
        assert self._passing, "a mixture's layer"
        x = self._normalize(norm, x, torch.empty_like(x), pad_grid=True)
        weight, bias = self._vectors[router.weight.name], self._vector(router.bias)
        stacked = self._stacked.get(router.weight.name)
        use = self.expert_use.rows(router, self._kind) if self.expert_use else None
        return x, self._passing.route(x, weight, bias, self._positions, stacked, use)

    def experts(
        self,
        experts: Experts,
        x: torch.Tensor,
        chosen: Choices,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`experts` of x by the choices of `route`: gated rows [n k, M / 2], or [n, H].

        The result overwrites `residual`.
        """
        assert self._passing, "after route"
        name, operands, staging = experts.name, self._operands[experts.name], self.staging
        if staging:
            staging.fetch(name)
        pdl = not (staging and staging.waits(name))
        if residual is None:
            out = self._passing.gate_up(x, chosen, *operands, pdl=pdl)
        else:
            out = self._passing.down(x, chosen, *operands, residual, pdl=pdl)
        if staging:
            staging.release(name)
        self._pdl = True
        return out

    def head_norms(self, attention: Attention) -> HeadNorms | None:
        """The norms of query and key heads, if there are any of single heads."""
        if not attention.norms or attention.norms_all_heads:
            return None
        q_weight, k_weight = (self._vectors[norm.name] for norm in attention.norms)
        return HeadNorms(q_weight, k_weight, self.model.config.norm_eps)

    def normalize_heads(self, attention: Attention, qkv: torch.Tensor) -> None:
        """Apply norms of heads, if any, to a fused projection [n, (Hq + 2 Hkv) * D], in place."""
        if attention.norms_all_heads:
            first = 0
            for operand in attention.norms:  # a row's queries, then its keys
                weight = self._vectors[operand.name]
                some = qkv[:, first : first + len(weight)]
                eps = self.model.config.norm_eps
                normalize(some, some, "rms", eps=eps, weight=weight, pdl=True, pad_grid=True)
                first += len(weight)
            return
        norms = self.head_norms(attention)
        if norms:
            heads = qkv.view(len(qkv), -1, attention.head_dim)
            normalize_heads(heads, norms, kv_heads=attention.kv_heads, pdl=True)

    def kernel_for(self, n: int) -> By:
        """The kernel of most products of `n` rows."""
        return self._products.kernel_for(n, self.matrices[self.order[0].name])

    def one_cta_per_sm(self, n: int) -> bool:
        """Whether a product of `n` rows takes SMs for itself, most with one CTA on each."""
        return self.kernel_for(n) == "tiled"

    def _make_tables(self, use: ExpertUse) -> None:
        """Let kernels read the stack indices of experts from tables."""
        self.expert_tables = tables = ExpertTables(use, self.like.device)
        found = dict(self.matrices)
        for layer, mixture in enumerate(use.mixtures):
            self._stacked[mixture.router.weight.name] = tables.stack_indices(layer)
            for number, one in enumerate((mixture.up, mixture.down)):
                shifts = tables.shifts(layer, number)
                found[one.name] = replace(found[one.name], shifts=shifts)
        self.matrices = found

    def _allocate(self, n: int, *, logits: bool = False) -> dict[str, torch.Tensor]:
        """Outputs of a pass of `n` tokens by op; `x` are the hidden states."""
        widths = dict(self.model.widths)
        if logits:
            widths[self.model.head.op] = self.model.head.width
        return {op: self.like.new_empty(n, width) for op, width in widths.items()}

    def _expert_products(self, rows: int) -> ExpertProducts | None:
        """Products with experts of a pass of `rows` tokens, if the model has experts."""
        config = self.model.config
        if not config.mixture:
            return None
        routing, ffn = config.mixture.routing, config.mixture.ffn_size
        card = card_of(self.like.device)
        matrices = [m for m in self.model.matrices() if isinstance(m, Experts)]
        atom_bytes = max(self.matrices[m.name].format.atom_bytes for m in matrices)
        return ExpertProducts(rows, routing, config.hidden_size, ffn, self.like, card, atom_bytes)

    def _out(self, linear: Linear, n: int) -> torch.Tensor:
        if self._logits is not None and linear is self.model.head:
            return self._logits[:n]
        if linear.op in self._buffers:
            return self._buffers[linear.op][:n]
        return self.like.new_empty(n, linear.width)

    def _read_by(self, staging: Staging | None) -> Operands:
        """Each matrix, its remote rows in the ring where it is staged, and how kernels read it."""
        found = {}
        for matrix in self.model.matrices():
            weight = staging.matrix(matrix.name) if staging else self.matrices[matrix.name]
            found[matrix.name] = (
                weight,
                tuple(
                    TierAccess() if part.tier == LOCAL else access
                    for part, access in zip(weight.parts, self._accesses[matrix.op], strict=True)
                ),
            )
        return found

    def _ahead(self, name: str, n: int) -> torch.Tensor | None:
        """The bytes to prefetch into L2: of the part in HBM of the matrix used after `name`."""
        following = self._following.get(name)
        return None if following is None else self._products.ahead(n, *self._operands[following])

    def _normalize(
        self, norm: Norm, x: torch.Tensor, out: torch.Tensor, *, pad_grid: bool = False
    ) -> torch.Tensor:
        """Apply a norm that is not folded into a matrix to the rows of x; return `out`."""
        return normalize(
            x, out, norm.kind, eps=self.model.config.norm_eps, weight=self._vector(norm.weight),
            bias=self._vector(norm.bias), pdl=True, pad_grid=pad_grid,
        )  # fmt: skip

    def _vector(self, operand: Operand | None) -> torch.Tensor | None:
        return self._vectors[operand.name] if operand else None
