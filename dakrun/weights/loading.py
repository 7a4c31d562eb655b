"""Weights into the tiers of a plan: packed for the GPU's kernels, or row by row for plain torch.

Knows a plan, a manifest and a source of tensors, not the forward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dakrun.hardware import Card
from dakrun.interrupt import Workers
from dakrun.launches import TierAccess, split_row_blocks
from dakrun.memory.matrix import PIECE_ELEMENTS, TieredMatrix, allocated_bytes
from dakrun.memory.tiers import Tier, aligned
from dakrun.plan import Plan
from dakrun.weights.manifest import Manifest, Request, Source, Weights, fold, interleave
from dakrun.weights.streaming import reader_count

OnLoad = Callable[[int, int], None]  # called with the bytes of matrices loaded so far, and of all
COPY_ELEMENTS = 1 << 22  # copied by a thread in one call; short enough for a prompt Ctrl-C


class Tensors(Protocol):
    """A source of weights: a Checkpoint or Dummy."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def check(self, manifest: Manifest) -> None:
        """Raise CannotRun unless the source has every tensor of `manifest`."""
        ...

    def copy(self, source: Source, rows: slice, out: torch.Tensor) -> None:
        """Copy rows of a tensor into `out`, converting the dtype; may run in several threads."""
        ...

    def stream(
        self, requests: Sequence[Request], device: torch.device
    ) -> Iterator[list[torch.Tensor]]:
        """The rows of each request on `device`, valid until the next ones are asked for."""
        ...


@dataclass(frozen=True)
class Packing:
    """Parameters of packing: how kernels read the tiers of each op, and the GPU's SMs."""

    accesses: Mapping[str, tuple[TierAccess, ...]]
    card: Card


def can_pack(plan: Plan) -> bool:
    """Whether the GPU's kernels can read all matrices of the plan's model."""
    formats = ((op.op.stored().packed, op.op.shape[1]) for op in plan.weights())
    return all(packed is not None and packed.takes(cols) for packed, cols in formats)


def tier_capacities(plan: Plan, *, packed: bool) -> dict[str, int]:
    """Bytes to allocate in each tier for the plan's matrices and KV blocks, alignment included."""
    sizes = [aligned(plan.memory(number)["kv"]) for number in range(len(plan.tiers))]
    for op in plan.weights():
        for counts in op.placement:
            stored = op.op.stored(packed=packed)
            for number, size in enumerate(allocated_bytes(stored, op.op.shape, counts)):
                sizes[number] += size
    return dict(zip(plan.tiers, sizes, strict=True))


def load(
    source: Tensors,
    manifest: Manifest,
    plan: Plan,
    tiers: Mapping[str, Tier],
    device: torch.device,
    *,
    packing: Packing | None = None,
    on_load: OnLoad = lambda done, total: None,
) -> Weights:
    """Allocate and fill every operand, in the plan's dtype; resident tensors go to `device`.

    With `packing`, which needs can_pack(plan), matrices are packed, with the manifest's norms
    folded in; a fold changes a matrix's bias, or adds one. Without, they are rows as stored.
    `on_load` is called as pieces are loaded. Raises CannotRun if the source lacks a tensor of the
    manifest (before anything is allocated), or cannot be read.
    """
    source.check(manifest)
    dtype = getattr(torch, plan.model.dtype)
    if packing is None:
        manifest = replace(manifest, folded={}, interleaved=frozenset())
        resident = _resident(source, manifest, dtype, device)
        return Weights(_partitioned(source, manifest, plan, tiers, on_load), resident)
    resident = _resident(source, manifest, torch.float32, device)
    matrices = _allocate(manifest, plan, tiers, packing)
    _fill(matrices, source, manifest, resident, device, on_load)
    if device.type == "cuda":  # a PDL launch does not wait for the kernels that fill a matrix
        torch.cuda.synchronize(device)
    return Weights(matrices, {name: vector.to(dtype) for name, vector in resident.items()})


def _allocate(
    manifest: Manifest, plan: Plan, tiers: Mapping[str, Tier], packing: Packing | None
) -> dict[str, TieredMatrix]:
    """All matrices in the manifest's order, uninitialised."""
    ops = {
        op.op.layer_name(layer): (op.op, layer)
        for op in plan.weights()
        for layer in range(op.op.layers)
    }
    matrices, dtype = {}, getattr(torch, plan.model.dtype)
    for name in manifest.matrices:
        op, layer = ops[name]
        placement, splits = plan.placement(op.name, layer), None
        if packing is not None:
            counts = [count for _, count in placement]
            splits = split_row_blocks(counts, packing.accesses[op.name], card=packing.card)
        matrices[name] = TieredMatrix.empty(
            manifest.matrix_shape(name), dtype, op.stored(packed=packing is not None), placement,
            tiers, splits,
        )  # fmt: skip
    return matrices


def _resident(
    source: Tensors, manifest: Manifest, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The resident tensors on `device`."""
    resident = {}
    for name, sources in manifest.resident.items():
        tensors = [torch.empty(shape, dtype=dtype) for _, shape in sources]
        for one, tensor in zip(sources, tensors, strict=True):
            source.copy(one, slice(0, len(tensor)), tensor)
        alternate = name.removesuffix(".bias") in manifest.interleaved
        resident[name] = _joined(tensors, alternate=alternate).to(device)
    return resident


def _partitioned(
    source: Tensors,
    manifest: Manifest,
    plan: Plan,
    tiers: Mapping[str, Tier],
    on_load: OnLoad,
) -> dict[str, TieredMatrix]:
    """All matrices, their rows as stored."""
    matrices, jobs = _allocate(manifest, plan, tiers, None), []
    total, done = _nbytes(matrices), 0
    with Workers(reader_count()) as readers:
        for name, matrix in matrices.items():
            for part, of_part in matrix.rows():
                data, top = matrix.read(part), 0  # a view
                for one, rows in manifest.request(name, of_part):
                    for some in _pieces(rows, matrix.shape[1]):
                        out = data[top : top + some.stop - some.start]
                        jobs.append((readers.submit(source.copy, one, some, out), out.nbytes))
                        top += len(out)
        for job, nbytes in jobs:
            job.result()
            done += nbytes
            on_load(done, total)
    return matrices


def _pieces(rows: slice, cols: int) -> Iterator[slice]:
    """Divide `rows` into ranges of up to COPY_ELEMENTS, of one row at least."""
    step = max(1, COPY_ELEMENTS // cols)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def _nbytes(matrices: Mapping[str, TieredMatrix]) -> int:
    """Bytes of all matrices."""
    return sum(part.nbytes for matrix in matrices.values() for part in matrix.parts)


def _fill(
    matrices: Mapping[str, TieredMatrix],
    source: Tensors,
    manifest: Manifest,
    resident: dict[str, torch.Tensor],
    device: torch.device,
    on_load: OnLoad,
) -> None:
    """Write all matrices, with norms folded in; `resident` tensors are float32 on `device`.

    The contribution of a norm's bias is added to the matrix's bias, which is created if absent.
    """
    jobs = [
        (name, piece)
        for name, matrix in matrices.items()
        for piece in matrix.pieces(PIECE_ELEMENTS)
    ]
    requests = [manifest.request(name, piece.rows) for name, piece in jobs]
    done, total = 0, _nbytes(matrices)
    for (name, piece), tensors in zip(jobs, source.stream(requests, device), strict=True):
        matrix = matrices[name]
        rows = _joined(tensors, alternate=name in manifest.interleaved)
        if name in manifest.folded:
            rows, added = fold(rows, manifest.folded[name], resident)
            if added is not None:
                zeros = torch.zeros(matrix.shape[0], device=device)
                resident.setdefault(f"{name}.bias", zeros)[piece.rows] += added
        piece.write(rows.to(matrix.dtype))
        done += piece.part.format.nbytes(len(rows), matrix.shape[1])
        on_load(done, total)


def _joined(tensors: list[torch.Tensor], *, alternate: bool) -> torch.Tensor:
    """Stack `tensors` along dimension 0, their rows alternating if `alternate`."""
    if alternate:
        return interleave(tensors)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
