"""Weights into the tiers of a plan: packed for the GPU's kernels, or row by row for plain torch.

Knows a plan, the modules of its model and a source of tensors, not the forward pass. For kernels
norms are folded into matrices. A norm of a row x is r (x - mean(x)) g + b, where r is one number;
RMSNorm has no mean and no b. Let W'[m, k] = W[m, k] g[k], from which LayerNorm also subtracts the
mean over k, and bias'[m] = bias[m] + sum_k W[m, k] b[k]. Then W norm(x) + bias = r W' x + bias', so
that the kernels only scale rows by r.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dakrun.formats import QuantisedRows, Split, WeightFormat
from dakrun.formats.quantised_rows import dense
from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.hardware import Card
from dakrun.interrupt import Workers
from dakrun.launches import TierAccess, expert_splits, split_row_blocks
from dakrun.memory.matrix import PIECE_ELEMENTS, TieredMatrix, allocated_bytes
from dakrun.memory.tiers import Tier, aligned
from dakrun.models.decoder import Decoder
from dakrun.models.experts import Experts
from dakrun.models.families import decoder_of
from dakrun.models.modules import Matrix, Norm
from dakrun.models.operands import Request, Source
from dakrun.plan import Op, Plan
from dakrun.weights.parts import Decoded
from dakrun.weights.streaming import reader_count

OnLoad = Callable[[int, int], None]  # called with the bytes of matrices loaded so far, and of all
COPY_ELEMENTS = 1 << 22  # copied by a thread in one call; short enough for a prompt Ctrl-C


class Tensors(Protocol):
    """A source of weights: a Checkpoint or Dummy."""

    def check(self, model: Decoder) -> None:
        """Raise CannotRun unless the source has every tensor of `model`. Comes before all else."""
        ...

    def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
        """Copy rows of a tensor into `out`, converting the dtype; may run in several threads."""
        ...

    def stream(self, requests: Sequence[Request], device: torch.device) -> Iterator[list[Decoded]]:
        """The rows of each request on `device`, valid until the next ones are asked for.

        Plain rows are a tensor [R, K]; quantized ones what their layout writes.
        """
        ...


@dataclass(frozen=True)
class Weights:
    """A model's loaded operands by name: `matrices` in their tiers, all others `resident`."""

    matrices: Mapping[str, TieredMatrix]
    resident: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """Parameters of packing: how kernels read the tiers of each op, and the GPU's card."""

    accesses: Mapping[str, tuple[TierAccess, ...]]
    card: Card


def unreadable(plan: Plan) -> Op | None:
    """The first matrix of the plan's model that the GPU's kernels cannot read; None if none is."""
    for op in (one.op for one in plan.weights()):
        packed = op.stored().packed
        if packed is None or not packed.takes(op.shape[1]):
            return op
    return None


def tier_capacities(plan: Plan, *, packed: bool) -> dict[str, int]:
    """Bytes to allocate in each tier for the plan's matrices and KV blocks, alignment included."""
    sizes = [aligned(plan.memory(number)["kv"]) for number in range(len(plan.tiers))]
    for op in plan.weights():
        stored, matrix = op.op.stored(packed=packed), op.op.matrix
        height = 0
        if packed and isinstance(matrix, Experts):
            height = matrix.expert_rows // ROWS_PER_BLOCK
        for counts in op.placement:
            for number, size in enumerate(allocated_bytes(stored, op.op.shape, counts, height)):
                sizes[number] += size
    return dict(zip(plan.tiers, sizes, strict=True))


def load(
    source: Tensors,
    plan: Plan,
    tiers: Mapping[str, Tier],
    device: torch.device,
    *,
    packing: Packing | None = None,
    on_load: OnLoad = lambda done, total: None,
) -> Weights:
    """Allocate and fill the model's operands, in the plan's dtype; all but matrices on `device`.

    `source` has been checked to have all tensors of the model.

    With `packing`, where none is `unreadable`, matrices are packed, with norms folded in; a fold
    changes a matrix's bias, or adds one. Without `packing` they keep the checkpoint's rows. Codes
    and scales of quantized matrices keep their values in both cases. `on_load` is called as pieces
    are loaded. Raises CannotRun if the source cannot be read.
    """
    model, dtype = decoder_of(plan.model), getattr(torch, plan.model.dtype)
    packed = packing is not None
    kept = torch.float32 if packed else dtype  # folds are computed in float32
    resident = _resident(source, model, kept, device, for_kernels=packed)
    matrices = _allocate(model, plan, tiers, packing)
    loaded = _Loaded(matrices, on_load)
    if not packed:
        _copy_rows(source, model, matrices, loaded)
        return Weights(matrices, resident)
    _fill(list(model.matrices()), matrices, source, resident, device, loaded, for_kernels=True)
    if device.type == "cuda":  # a PDL launch does not wait for the kernels that fill a matrix
        torch.cuda.synchronize(device)
    wide = {vector.name for vector in model.vectors() if vector.wide}
    narrow = {name: vector.to(dtype) for name, vector in resident.items() if name not in wide}
    return Weights(matrices, resident | narrow)


def _allocate(
    model: Decoder, plan: Plan, tiers: Mapping[str, Tier], packing: Packing | None
) -> dict[str, TieredMatrix]:
    """Allocate all matrices, in the order of their use."""
    matrices, dtype = {}, getattr(torch, plan.model.dtype)
    counts = Counter[str]()  # of an op's matrices so far
    for matrix in model.matrices():
        op = plan.op(matrix.op).op
        placement, splits = plan.placement(op.name, counts[op.name]), None
        counts[op.name] += 1
        stored = op.stored(packed=packing is not None)
        if packing is not None:
            splits = _splits(matrix, [count for _, count in placement], stored, packing)
        matrices[matrix.name] = TieredMatrix.empty(
            matrix.shape, dtype, stored, placement, tiers, splits
        )
    return matrices


def _splits(
    matrix: Matrix, counts: Sequence[int], stored: WeightFormat, packing: Packing
) -> tuple[Split, ...]:
    """How `counts` of row blocks by tier are stored for the kernels that read `matrix`."""
    if isinstance(matrix, Experts):
        height = matrix.expert_rows // ROWS_PER_BLOCK
        top_k = matrix.routing.top_k
        return expert_splits(
            counts, expert_row_blocks=height, top_k=top_k, card=packing.card,
            atom_bytes=stored.atom_bytes,
        )  # fmt: skip
    accesses = packing.accesses[matrix.op]
    return split_row_blocks(counts, accesses, card=packing.card, atom_bytes=stored.atom_bytes)


def _resident(
    source: Tensors,
    model: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    *,
    for_kernels: bool,
) -> dict[str, torch.Tensor]:
    """All operands beside matrices, on `device`."""
    resident = {}
    for vector in model.vectors():
        tensors = []
        for one, rows in vector.request(slice(0, vector.shape[0]), for_kernels=for_kernels):
            kept = torch.float32 if vector.wide else dtype
            tensors.append(torch.empty(rows.stop - rows.start, *one.shape[1:], dtype=kept))
            source.copy(one, rows, tensors[-1])
        alternate = for_kernels and vector.interleaved
        resident[vector.name] = _joined(tensors, alternate=alternate).to(device)
    return resident


def _copy_rows(
    source: Tensors, model: Decoder, matrices: Mapping[str, TieredMatrix], loaded: "_Loaded"
) -> None:
    """Read all `matrices` with the checkpoint's rows: plain ones straight to where they stay."""
    jobs, quantised = [], []
    with Workers(reader_count()) as readers:
        for matrix in model.matrices():
            if matrix.quantised:
                quantised.append(matrix)
                continue
            found = matrices[matrix.name]
            for part, of_part in found.rows:
                data, top = found.read(part), 0  # a view
                for one, rows in matrix.request(of_part, for_kernels=False):
                    for some in _pieces(rows, matrix.shape[1]):
                        out = data[top : top + some.stop - some.start]
                        jobs.append((readers.submit(source.copy, one, some, out), out.nbytes))
                        top += len(out)
        for job, nbytes in jobs:
            job.result()
            loaded.add(nbytes)
    if quantised:
        cpu = torch.device("cpu")
        _fill(quantised, matrices, source, {}, cpu, loaded, for_kernels=False)


def _pieces(rows: slice, cols: int) -> Iterator[slice]:
    """Divide `rows` into ranges of up to COPY_ELEMENTS, of one row at least."""
    step = max(1, COPY_ELEMENTS // cols)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


class _Loaded:
    """Counts the bytes that are loaded, of those of all matrices."""

    def __init__(self, matrices: Mapping[str, TieredMatrix], on_load: OnLoad) -> None:
        self._done, self._on_load = 0, on_load
        self._total = sum(part.nbytes for matrix in matrices.values() for part in matrix.parts)

    def add(self, nbytes: int) -> None:
        """Tell of `nbytes` more."""
        self._done += nbytes
        self._on_load(self._done, self._total)


def _fill(
    matrices: Sequence[Matrix],
    to: Mapping[str, TieredMatrix],
    source: Tensors,
    resident: dict[str, torch.Tensor],
    device: torch.device,
    loaded: _Loaded,
    *,
    for_kernels: bool,
) -> None:
    """Write `matrices`, `for_kernels` with norms folded in; `resident` are float32 on `device`.

    The contribution of a norm's bias is added to the matrix's bias, which is created if absent.
    """
    jobs = [
        (matrix, piece) for matrix in matrices for piece in to[matrix.name].pieces(PIECE_ELEMENTS)
    ]
    requests = [matrix.request(piece.rows, for_kernels=for_kernels) for matrix, piece in jobs]
    streamed = source.stream(requests, device)
    for (matrix, piece), request, found in zip(jobs, requests, streamed, strict=True):
        dtype, alternate = to[matrix.name].dtype, for_kernels and matrix.interleaved
        if isinstance(matrix.format, QuantisedRows):
            each = zip(*found, strict=True)  # codes, scales, ... of all sources
            piece.write(*(_joined(list(tensors), alternate=alternate) for tensors in each))
        else:
            plain = [
                dense(one.layout, dtype, *rows) if one.layout else rows[0]
                for (one, _), rows in zip(request, found, strict=True)
            ]
            rows = _joined(plain, alternate=alternate)
            if for_kernels and matrix.folded:
                rows, added = _fold(rows, matrix.folded, resident)
                if added is not None:
                    zeros = torch.zeros(matrix.shape[0], device=device)
                    resident.setdefault(matrix.bias_name, zeros)[piece.rows] += added
            piece.write(rows.to(dtype))
        loaded.add(piece.part.format.nbytes(piece.rows.stop - piece.rows.start, matrix.shape[1]))


def _joined(tensors: list[torch.Tensor], *, alternate: bool) -> torch.Tensor:
    """Stack `tensors` along dimension 0; if `alternate`, the rows of each two of them alternate."""
    if alternate:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        tensors = [torch.stack(pair, 1).flatten(0, 1) for pair in pairs]
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _fold(
    rows: torch.Tensor, norm: Norm, vectors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [M, K] of W', float32, from rows of W, and the change of their bias, [M] or None.

    `vectors` has the norm's weight and bias by name, float32 [K]. `rows` may be overwritten.
    """
    rows = rows.float()
    added = _row_sums(rows * vectors[norm.bias.name]) if norm.bias else None
    if norm.weight:
        rows *= vectors[norm.weight.name]
    if norm.kind == "layer":
        rows -= _row_sums(rows)[:, None] / rows.shape[1]
    return rows, added


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows, float32, added in float64: the same bits however many rows come together."""
    return rows.sum(1, dtype=torch.float64).float()
