"""The ops of a decode step: bytes kept, bytes read and FLOPs of each.

Knows the model's modules and the workload; knows no hardware and no placement.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dakrun.config import DTYPE_BYTES, ModelConfig, Workload
from dakrun.formats import PACKED16, KVLayout, QuantisedRows, Rows, WeightFormat
from dakrun.geometry import KV_BLOCK, ROWS_PER_BLOCK, first_row, row_block_count
from dakrun.models.decoder import passes_on_norm
from dakrun.models.experts import Experts
from dakrun.models.families import decoder_of
from dakrun.models.modules import Linear, Matrix
from dakrun.models.operands import Scope
from dakrun.units import ceil_div

EXPERT_CLASSES = 16  # parts of an op's experts, by popularity, for which ratios are sought
ALIKE = 1e-9  # chances that differ by less are the same
# Share of the bytes of remote experts that a step reads, at least, if all of them are to be staged:
# direct reading of host memory reaches so much of the copy engine's rate (51 of 55 GB/s).
STAGED_EXPERTS = 0.9
FEW_SLOTS, SLOT_PARTS = 4, 32  # slots that are not divided; parts of fewer, in all


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the decode step, in each of `layers` layers (1 outside the layers).

    All figures are for one layer. `resident_bytes` is kept, `read_bytes` is read by a step: the
    same for a weight; less for a KV cache that is not full and for an embedding table; of experts
    as many as the step is expected to choose. Placement is
    in `units`: row blocks of a weight; slots of a cache, which has `kv_blocks` in all, or parts of
    them (slot_parts), rounded to whole blocks. `matrix` is the first layer's, stored in `format`.
    An element of activations has `element_bytes`. A linear op that is `normed` has a norm ahead of
    it; with `norm_between` the products around that norm do it, if rows are few. Of experts
    `chances` has the chance that a step reads each, in the order of the units.
    """

    name: str
    category: Literal["linear", "experts", "attention", "gather"]
    layers: int
    in_layer: bool
    shape: tuple[int, int]
    batch_size: int
    element_bytes: int
    resident_bytes: int
    read_bytes: float
    flops: float
    units: int
    format: WeightFormat | None = None
    kv_blocks: int = 0
    normed: bool = False
    norm_between: bool = False
    chances: tuple[float, ...] = ()
    matrix: Matrix | None = field(default=None, compare=False, repr=False)

    def with_rows(self, rows: int) -> "Op":
        """The same op of a pass of `rows` tokens, if it is not attention."""
        assert self.matrix and self.format, f"{self.name} has no matrix"
        return replace(
            self, batch_size=rows, read_bytes=_bytes_read(self.matrix, self.format, rows),
            flops=self.matrix.flops(rows), chances=_chances(self.matrix, rows),
        )  # fmt: skip

    def stored(self, *, packed: bool = False) -> WeightFormat:
        """The format of a weight as the plan counts it, or `packed` for kernels that read it."""
        found = self.format.packed if packed and self.format else self.format
        assert found, f"{self.name} has no such format"
        return found

    @functools.cached_property
    def atom_bytes(self) -> int:
        """Bytes of an atom of a weight in kernels' rings; of 16-bit elements if none reads it."""
        return (self.stored().packed or PACKED16).atom_bytes

    @functools.cached_property
    def quantized(self) -> str:
        """The kind of a quantized weight's elements (hardware.QUANTIZED); "" if it is none."""
        return self.format.layout.kind if isinstance(self.format, QuantisedRows) else ""

    def unit_bytes(self, first: int, last: int) -> int:
        """Resident bytes of the units first ... last - 1."""
        if self.category == "attention":
            blocks = last * self.kv_blocks // self.units - first * self.kv_blocks // self.units
            return self.resident_bytes // self.kv_blocks * blocks
        rows, cols = self.shape
        return self.stored().nbytes(first_row(last, rows) - first_row(first, rows), cols)

    def tier_bytes(self, counts: Sequence[int]) -> list[int]:
        """Resident bytes of one layer in each tier, given the units per tier in their order."""
        ends = list(itertools.accumulate(counts))
        return [self.unit_bytes(end - n, end) for n, end in zip(counts, ends, strict=True)]

    def shares(self, counts: Sequence[int]) -> list[float]:
        """Share of one layer's resident bytes in each tier, given the units per tier."""
        return [size / self.resident_bytes for size in self.tier_bytes(counts)]

    def read_shares(self, counts: Sequence[int]) -> list[float]:
        """Share of one layer's bytes read that lie in each tier, given the units per tier."""
        shares = self.shares(counts)
        if not self.chances:
            return shares
        ends = [self.reads_of(end) for end in itertools.accumulate(shares)]
        return [end - start for start, end in zip([0.0, *ends], ends, strict=False)]

    def tier_reads(self, counts: Sequence[int]) -> list[float]:
        """Bytes of one layer that a step reads in each tier, given the units per tier."""
        if self.chances:
            return [share * self.read_bytes for share in self.read_shares(counts)]
        return [n * self.read_bytes / self.resident_bytes for n in self.tier_bytes(counts)]

    def reads_of(self, share: float) -> float:
        """Share of the reads of experts that the first `share` of their bytes have."""
        whole, part = divmod(min(share, 1.0) * len(self.chances), 1.0)
        sums = self._sums_of_chances
        last = sums[min(int(whole) + 1, len(self.chances))]
        return (sums[int(whole)] + part * (last - sums[int(whole)])) / sums[-1]

    @functools.cached_property
    def _sums_of_chances(self) -> list[float]:
        return [0.0, *itertools.accumulate(self.chances)]

    @functools.cached_property
    def classes(self) -> tuple[float, ...]:
        """Shares of the bytes read that equal parts of the bytes have, from the last units on.

        It is one class if all bytes are read alike, else up to EXPERT_CLASSES.
        """
        if not self.chances or max(self.chances) - min(self.chances) < ALIKE:
            return (1.0,)
        count = min(EXPERT_CLASSES, len(self.chances))
        ends = [self.reads_of(part / count) for part in range(count, -1, -1)]
        return tuple(first - second for first, second in itertools.pairwise(ends))

    def can_be_staged(self, local: float = 0.0) -> bool:
        """Whether a step may copy all remote bytes ahead of their use, a share `local` being local.

        It may copy linear weights, and remote experts if it reads nearly all of them; slots and
        rows of a table are read in place.
        """
        if self.category == "experts":
            read = (1 - self.reads_of(local)) * self.read_bytes
            return read >= STAGED_EXPERTS * (1 - local) * self.resident_bytes
        return self.category == "linear"

    @property
    def rows_per_weight(self) -> float:
        """Rows of activations with which a row of the matrix that is read is multiplied."""
        elements = self.shape[0] * self.shape[1] * self.read_bytes / self.resident_bytes
        return self.flops / (2 * elements)

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte moved: weights, inputs and outputs of a linear op; else what is read."""
        if self.category == "linear":
            m, k = self.shape
            n = self.batch_size
            return self.flops / (self.resident_bytes + self.element_bytes * n * (k + m))
        return self.flops / self.read_bytes


def kv_positions(workload: Workload) -> int:
    """Positions that a slot of the KV cache holds at most: max_model_len in whole blocks."""
    return ceil_div(workload.max_model_len, KV_BLOCK) * KV_BLOCK


def kept_positions(workload: Workload) -> int:
    """Positions for which memory has KV blocks, for each slot; requests take blocks as they grow.

    As many as a request of the expected lengths has at its end, and half a block, since the last
    block of a request is half empty on average; or `kept_len`. All slots together have at least
    twice the blocks of the longest request, so that one of two tiers has room for it.
    """
    longest = kv_positions(workload) // KV_BLOCK
    positions = workload.prompt_len + workload.new_tokens + KV_BLOCK // 2
    expected = ceil_div(workload.kept_len or positions, KV_BLOCK)
    least = ceil_div(2 * longest, workload.batch_size)
    return min(longest, max(expected, least)) * KV_BLOCK


def read_positions(workload: Workload) -> float:
    """Positions that a step reads from a slot on average, as far as there are blocks for them."""
    return min(workload.mean_kv_len, kept_positions(workload))


def slot_parts(workload: Workload) -> int:
    """Parts into which placement divides a slot of the KV cache: 1 for FEW_SLOTS slots or more.

    Their number is a power of two. A part has at least one KV block; all slots together have up to
    SLOT_PARTS parts.
    """
    if workload.batch_size >= FEW_SLOTS:
        return 1
    most = min(SLOT_PARTS // workload.batch_size, kept_positions(workload) // KV_BLOCK)
    return 1 << (most.bit_length() - 1)


def cost_kinds(model: ModelConfig) -> frozenset[str]:
    """The kinds of costs in hardware.ESTIMATED that plans of `model` need.

    They are the kinds of its quantized weights; for a mixture also "experts" and "router".
    """
    matrices = list(decoder_of(model).matrices())
    formats = (matrix.format for matrix in matrices)
    kinds = {stored.layout.kind for stored in formats if isinstance(stored, QuantisedRows)}
    if any(isinstance(matrix, Experts) for matrix in matrices):
        kinds |= {"experts", "router"}
    return frozenset(kinds)


def decode_ops(
    model: ModelConfig, workload: Workload, *, divides_slots: bool = False
) -> tuple[Op, ...]:
    """The ops of one decode step in their order; one Op stands for the same op of all layers.

    A post-norm is attributed to the layers' next matrix, which waits for it. With `divides_slots`
    the units of attention are parts of slots where slots are few (slot_parts).
    """
    size, n = DTYPE_BYTES[model.dtype], workload.batch_size
    decoder = decoder_of(model)
    linears = [module for module in decoder.modules() if isinstance(module, Linear)]
    normed = {matrix.op for matrix in decoder.matrices() if matrix.norm}
    for before, linear in itertools.pairwise(linears):
        if before.post_norm and linear.layer is not None:
            normed.add(linear.op)
    multiplied = [module for module in decoder.modules() if isinstance(module, Linear | Experts)]
    between = {two.op for one, two in itertools.pairwise(multiplied) if passes_on_norm(one, two)}
    found = []
    for name, modules in decoder.ops.items():
        module = modules[0]
        if isinstance(module, Matrix):
            op = matrix_op(module, module.format, n=n, element_bytes=size, normed=name in normed)
        else:
            op = attention_op(
                module.heads,
                model.kv_layout,
                n=n,
                parts=slot_parts(workload) if divides_slots else 1,
                length=read_positions(workload),
                positions=kept_positions(workload),
            )
        found.append(
            replace(
                op, layers=len(modules), in_layer=module.layer is not None,
                norm_between=name in between,
            )
        )  # fmt: skip
    return tuple(found)


def matrix_op(
    matrix: Matrix, format: WeightFormat, *, n: int, element_bytes: int, normed: bool = False
) -> Op:
    """What a pass of `n` tokens, of `element_bytes` an element, asks of `matrix` by itself."""
    rows, cols = matrix.shape
    return Op(
        name=matrix.op,
        category=matrix.category,
        layers=1,
        in_layer=False,
        shape=matrix.shape,
        units=row_block_count(rows),
        batch_size=n,
        element_bytes=element_bytes,
        resident_bytes=format.nbytes(rows, cols),
        read_bytes=_bytes_read(matrix, format, n),
        flops=matrix.flops(n),
        format=format,
        normed=normed,
        chances=_chances(matrix, n),
        matrix=matrix,
    )


def linear_op(name: str, shape: tuple[int, int], *, n: int, element_bytes: int) -> Op:
    """The product of `n` rows and a weight of `shape`, [M, K], that belongs to no model."""
    rows, cols = shape
    matrix = Linear(Scope(""), name, {name: rows}, cols)
    return matrix_op(matrix, Rows(element_bytes), n=n, element_bytes=element_bytes)


def attention_op(
    q_heads: int,
    layout: KVLayout,
    *,
    n: int,
    parts: int = 1,
    length: float,
    positions: int,
) -> Op:
    """Attention of `n` new tokens, each to `length` cached positions of the slot's `positions`.

    `positions` are of whole KV blocks. A unit is one of `parts` of a slot.
    """
    return Op(
        name="attention",
        category="attention",
        layers=1,
        in_layer=False,
        shape=(q_heads, layout.kv_heads),
        units=n * parts,
        kv_blocks=n * positions // KV_BLOCK,
        batch_size=n,
        element_bytes=layout.element_bytes,
        resident_bytes=n * positions * layout.position_bytes,
        read_bytes=n * length * layout.position_bytes,
        flops=4.0 * n * length * q_heads * layout.head_dim,
    )


def weight_bytes(ops: tuple[Op, ...]) -> int:
    """Bytes of all matrices of the model, the embedding table included."""
    return sum(op.layers * op.resident_bytes for op in ops if op.category != "attention")


def _chances(matrix: Matrix, tokens: int) -> tuple[float, ...]:
    """Chances that a pass of `tokens` tokens reads each expert; empty for other matrices."""
    return tuple(matrix.chances(tokens)) if isinstance(matrix, Experts) else ()


def _bytes_read(matrix: Matrix, format: WeightFormat, tokens: int) -> float:
    """Bytes of `matrix` that a pass of `tokens` tokens is expected to read."""
    read = matrix.rows_read(tokens) * format.row_block_bytes(matrix.shape[1])
    return read // ROWS_PER_BLOCK if isinstance(read, int) else read / ROWS_PER_BLOCK
