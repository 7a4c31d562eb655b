"""The checkpoint tensors of each operand of a model, and the folding of norms into matrices.

Built from the table in models/architectures.py. Knows tensor names and shapes, not files.

A norm of a row x is r (x - mean(x)) g + b, where r is one number; RMSNorm has no mean and no b.
Let W'[m, k] = W[m, k] g[k], from which LayerNorm also subtracts the mean over k, and
bias'[m] = bias[m] + sum_k W[m, k] b[k]. Then W norm(x) + bias = r W' x + bias', so that the kernels
only scale rows by r.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dakrun.memory.matrix import TieredMatrix
from dakrun.models.architectures import Architecture, Matrix, NormKind

Source = tuple[str, tuple[int, ...]]  # a checkpoint tensor's name and shape
Request = Sequence[tuple[Source, slice]]  # rows of several tensors


@dataclass(frozen=True)
class Fold:
    """A norm folded into a matrix: its kind, and operand names of its weight and bias, if any."""

    kind: NormKind
    weight: str | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The checkpoint tensors of every operand.

    The plan places `matrices`; `resident` tensors (norms, biases, positions) stay in the local
    tier. An operand with several sources stacks them along dimension 0.

    `folded` and `interleaved` concern packed matrices: the norm folded into each, by matrix, and
    the matrices in which rows of the two sources, or of the halves of one, alternate, and in whose
    biases elements do.
    """

    matrices: Mapping[str, tuple[Source, ...]]
    resident: Mapping[str, tuple[Source, ...]]
    folded: Mapping[str, Fold] = field(default_factory=dict)
    interleaved: frozenset[str] = frozenset()

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Shape of a matrix, all its sources together."""
        shapes = [shape for _, shape in self.matrices[name]]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def request(self, matrix: str, rows: slice) -> Request:
        """Rows of the sources that make up `rows` of a matrix.

        `rows` begins where a row block begins, and ends where one or the matrix ends.
        """
        sources = self.matrices[matrix]
        if matrix in self.interleaved:
            start, stop = rows.start // 2, rows.stop // 2
            if len(sources) == 2:
                return [(source, slice(start, stop)) for source in sources]
            half = sources[0][1][0] // 2
            return [(sources[0], slice(top + start, top + stop)) for top in (0, half)]
        found, top = [], 0
        for source in sources:
            start, stop = max(rows.start, top), min(rows.stop, top + source[1][0])
            if start < stop:
                found.append((source, slice(start - top, stop - top)))
            top += source[1][0]
        return found


@dataclass(frozen=True)
class Weights:
    """A model's operands where they were loaded to, under the manifest's names."""

    matrices: Mapping[str, TieredMatrix]
    resident: Mapping[str, torch.Tensor]


def manifest_of(model: Architecture, has: Callable[[str], bool]) -> Manifest:
    """The manifest of `model` in a checkpoint; `has(name)` is whether it has a tensor `name`.

    Checkpoints store names with or without the leading "model.". Every norm folds into the matrix
    behind it, but not into an embedding table.
    """
    root = model.family.root
    bare = root.removeprefix("model.")
    if has(f"{bare}embed_tokens.weight") and not has(f"{root}embed_tokens.weight"):
        root = bare
    hidden = model.config.hidden_size
    matrices: dict[str, tuple[Source, ...]] = {}
    resident: dict[str, tuple[Source, ...]] = {}
    folded: dict[str, Fold] = {}
    interleaved = set()
    if model.family.positions:
        count = model.config.max_positions + model.family.position_offset
        resident["positions"] = ((f"{root}{model.family.positions}.weight", (count, hidden)),)
    for name, matrix in model.matrices():
        modules = [(_module(root, name, matrix, source), rows) for source, rows in matrix.sources]
        matrices[name] = tuple((f"{m}.weight", (rows, matrix.cols)) for m, rows in modules)
        if matrix.bias:
            resident[f"{name}.bias"] = tuple((f"{m}.bias", (rows,)) for m, rows in modules)
        if matrix.activation == "silu_mul":
            interleaved.add(name)
        layer = name.removesuffix(matrix.op)
        for norm in (matrix.norm, matrix.post_norm):
            if norm:
                module = _module(root, name, matrix, norm.source)
                vectors = {kind: f"{layer}{norm.name}.{kind}" for kind in norm.vectors}
                for kind, vector in vectors.items():
                    resident[vector] = ((f"{module}.{kind}", (hidden,)),)
                if norm is matrix.norm and name != model.table:
                    folded[name] = Fold(norm.kind, vectors.get("weight"), vectors.get("bias"))
    for name, (module, size) in model.head_norms():
        resident[name] = ((f"{root}{module}.weight", (size,)),)
    return Manifest(matrices, resident, folded, frozenset(interleaved))


def _module(root: str, name: str, matrix: Matrix, source: str) -> str:
    """Hugging Face's name of the module `source` of a matrix (see architectures.Matrix)."""
    if source.startswith("."):
        return source[1:]
    return f"{root}{name.removesuffix(matrix.op)}{source}"


def fold(
    rows: torch.Tensor, norm: Fold, vectors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [M, K] of W', float32, from rows of W, and the change of their bias, [M] or None.

    `vectors` has the norm's weight and bias, float32 [K]. `rows` may be overwritten.
    """
    rows = rows.float()
    added = _row_sums(rows * vectors[norm.bias]) if norm.bias else None
    if norm.weight:
        rows *= vectors[norm.weight]
    if norm.kind == "layer":
        rows -= _row_sums(rows)[:, None] / rows.shape[1]
    return rows, added


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows, float32, added in float64: the same bits however many rows come together."""
    return rows.sum(1, dtype=torch.float64).float()


def interleave(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape with alternating rows: row i of tensor j is row n i + j of n tensors."""
    return torch.stack(list(tensors), 1).flatten(0, 1)
