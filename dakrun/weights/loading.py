"""Weights into the tiers of a plan: packed for the GPU's kernels, or row by row for plain torch.

Knows a plan, a manifest and a source of tensors, not the forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dakrun.kernels.gemm import storage
from dakrun.kernels.gemm.packing import PackedTensor, row_block_bytes
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.kernels.gemm.storage import PIECE_ELEMENTS
from dakrun.memory.tiers import PartitionedTensor, Tier, aligned
from dakrun.plan import Plan
from dakrun.weights.manifest import Manifest, Request, Source, Weights, fold, interleave
from dakrun.weights.streaming import reader_count


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
    sms: int


def can_pack(plan: Plan) -> bool:
    """Whether the GPU's kernels can read all matrices of the plan's model."""
    dtype = getattr(torch, plan.model.dtype)
    return all(storage.can_pack(dtype, op.op.shape[1]) for op in plan.weights())


def tier_capacities(plan: Plan, *, packed: bool) -> dict[str, int]:
    """Bytes to allocate in each tier for the plan's matrices and KV slots, alignment included."""
    attention = plan.op("attention")
    sizes = [aligned(attention.resident_bytes(number)) for number in range(len(plan.tiers))]
    for op in plan.weights():
        for counts in op.placement:
            row_blocks = [count * row_block_bytes(op.op.shape[1]) for count in counts]
            for number, size in enumerate(row_blocks if packed else op.op.tier_bytes(counts)):
                sizes[number] += aligned(size)
    return dict(zip(plan.tiers, sizes, strict=True))


def load(
    source: Tensors,
    manifest: Manifest,
    plan: Plan,
    tiers: Mapping[str, Tier],
    device: torch.device,
    *,
    packing: Packing | None = None,
) -> Weights:
    """Allocate and fill every operand, in the plan's dtype; resident tensors go to `device`.

    With `packing`, which needs can_pack(plan), matrices are PackedTensors with the manifest's norms
    folded in; a fold changes a matrix's bias, or adds one. Without, they are PartitionedTensors, as
    stored. Raises CannotRun if the source lacks a tensor of the manifest (before anything is
    allocated), or cannot be read.
    """
    source.check(manifest)
    dtype = getattr(torch, plan.model.dtype)
    if packing is None:
        manifest = replace(manifest, folded={}, interleaved=frozenset())
        resident = _resident(source, manifest, dtype, device)
        return Weights(_partitioned(source, manifest, plan, tiers, dtype), resident)
    resident = _resident(source, manifest, torch.float32, device)
    accesses, sms = packing.accesses, packing.sms
    matrices = {
        name: storage.allocate(
            manifest.matrix_shape(name), dtype, placement, accesses[op], tiers, sms=sms
        )
        for name, op, placement in _placements(manifest, plan)
    }
    _fill(matrices, source, manifest, resident, device)
    if device.type == "cuda":  # a PDL launch does not wait for the kernels that fill a matrix
        torch.cuda.synchronize(device)
    return Weights(matrices, {name: vector.to(dtype) for name, vector in resident.items()})


def _placements(
    manifest: Manifest, plan: Plan
) -> Iterator[tuple[str, str, tuple[tuple[str, int], ...]]]:
    """Name, op, and (tier, row blocks) of every matrix, in the manifest's order."""
    ops = {
        op.op.layer_name(layer): (op.op, layer)
        for op in plan.weights()
        for layer in range(op.op.layers)
    }
    for name in manifest.matrices:
        op, layer = ops[name]
        yield name, op.name, plan.placement(op.name, layer)


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
    dtype: torch.dtype,
) -> dict[str, PartitionedTensor]:
    """All matrices, their rows as stored."""
    matrices, jobs = {}, []
    with ThreadPoolExecutor(reader_count()) as readers:
        for name, _, placement in _placements(manifest, plan):
            shape = manifest.matrix_shape(name)
            matrices[name] = PartitionedTensor.empty(shape, dtype, placement, tiers)
            for part in matrices[name].parts:
                top = 0
                for one, rows in manifest.request(name, part.rows):
                    bottom = top + rows.stop - rows.start
                    jobs.append(readers.submit(source.copy, one, rows, part.data[top:bottom]))
                    top = bottom
        for job in jobs:
            job.result()
    return matrices


def _fill(
    matrices: Mapping[str, PackedTensor],
    source: Tensors,
    manifest: Manifest,
    resident: dict[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Write all matrices, with norms folded in; `resident` tensors are float32 on `device`.

    The contribution of a norm's bias is added to the matrix's bias, which is created if absent.
    """
    jobs = [
        (name, piece)
        for name, matrix in matrices.items()
        for piece in storage.pieces(matrix, PIECE_ELEMENTS)
    ]
    requests = [manifest.request(name, piece.rows) for name, piece in jobs]
    for (name, piece), tensors in zip(jobs, source.stream(requests, device), strict=True):
        matrix = matrices[name]
        rows = _joined(tensors, alternate=name in manifest.interleaved)
        if name in manifest.folded:
            rows, added = fold(rows, manifest.folded[name], resident)
            if added is not None:
                zeros = torch.zeros(matrix.shape[0], device=device)
                resident.setdefault(f"{name}.bias", zeros)[piece.rows] += added
        storage.write(piece, rows.to(matrix.dtype))


def _joined(tensors: list[torch.Tensor], *, alternate: bool) -> torch.Tensor:
    """Stack `tensors` along dimension 0, their rows alternating if `alternate`."""
    if alternate:
        return interleave(tensors)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
