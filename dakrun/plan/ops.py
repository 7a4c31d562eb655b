"""The ops of a decode step: bytes kept, bytes read and FLOPs of each.

Knows the model's modules and the workload; knows no hardware and no placement.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dakrun.config import DTYPE_BYTES, MAX_BIASES, ModelConfig, Workload
from dakrun.formats import PACKED16, KVLayout, QuantisedRows, Rows, WeightFormat
from dakrun.geometry import KV_BLOCK, ROWS_PER_BLOCK, first_row, row_block_count
from dakrun.launches import expert_buffer_bytes
from dakrun.models.experts import Experts
from dakrun.models.families import decoder_of
from dakrun.models.modules import Linear, Matrix
from dakrun.models.operands import Scope
from dakrun.units import ceil_div

BYTES_PER_ADJUSTED = 16  # of a token with a logit of its own: token, count, bias, logit
RESERVE_BYTES = 320 << 20  # of GPU memory: see reserve_bytes
# The driver maps page-locked memory in pages of 4 KiB, with 8 bytes for each, which makes 512;
# measured on an H200 for 19 and 49 GiB, 480 to 510 and some 20 MiB beside, which 400 covers.
HOST_BYTES_PER_PAGE_TABLE_BYTE = 400
PREFILL_CHUNK_TOKENS = 2048  # tokens of a pass in plain torch
EXPERT_CLASSES = 16  # parts of an op's experts, by popularity, for which ratios are sought
ALIKE = 1e-9  # chances that differ by less are the same
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
    it. Of experts `chances` has the chance that a step reads each, in the order of the units.
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
    def code_bits(self) -> int:
        """Bits of an element of a quantized weight; 0 if it has the products' dtype."""
        return self.format.layout.bits if isinstance(self.format, QuantisedRows) else 0

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
    block of a request is half empty on average. All slots together have at least twice the blocks
    of the longest request, so that one of two tiers has room for it.
    """
    longest = kv_positions(workload) // KV_BLOCK
    positions = workload.prompt_len + workload.new_tokens
    expected = ceil_div(positions + KV_BLOCK // 2, KV_BLOCK)
    least = ceil_div(2 * longest, workload.batch_size)
    return min(longest, max(expected, least)) * KV_BLOCK


def slot_parts(workload: Workload) -> int:
    """Parts into which placement divides a slot of the KV cache: 1 for FEW_SLOTS slots or more.

    Their number is a power of two. A part has at least one KV block; all slots together have up to
    SLOT_PARTS parts.
    """
    if workload.batch_size >= FEW_SLOTS:
        return 1
    most = min(SLOT_PARTS // workload.batch_size, kept_positions(workload) // KV_BLOCK)
    return 1 << (most.bit_length() - 1)


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
                length=workload.mean_kv_len,
                positions=kept_positions(workload),
            )
        found.append(replace(op, layers=len(modules), in_layer=module.layer is not None))
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


def vector_bytes(model: ModelConfig) -> int:
    """Bytes of norms, biases, learned positions and routers, which stay in the local tier."""
    size, vectors = DTYPE_BYTES[model.dtype], decoder_of(model).vectors()
    return sum(math.prod(one.shape) * (4 if one.wide else size) for one in vectors)


VERIFIED_TOKENS = 512  # of a step with drafts, at most
DRAFT_GRAPHS_BYTES = 16 << 20  # of at most 15 CUDA graphs of steps with drafts


def activation_bytes(
    model: ModelConfig, workload: Workload, chunk_tokens: int = PREFILL_CHUNK_TOKENS
) -> int:
    """Upper estimate of activations: the largest pass, the batch's logits, and what chooses tokens.

    It covers a pass of `chunk_tokens` on the kernels, and one of PREFILL_CHUNK_TOKENS in plain
    torch, which needs more memory per token. Plain torch chooses tokens with float32 copies of the
    logits; the kernels with tables of the requests that ask for penalties, which are made only for
    these (dakrun/kernels/adjustments.py). Logits for log-probabilities of prompts lie in buffers of
    the pass, which are idle then (KernelBackend.for_logits).
    """
    size, qkv = DTYPE_BYTES[model.dtype], model.q_size + 2 * model.kv_size
    tokens = pass_tokens(workload, PREFILL_CHUNK_TOKENS)
    width = 4 * model.hidden_size + 2 * qkv + 3 * model.ffn_size
    if of := model.mixture:  # an expert may have all tokens
        width += 4 * model.hidden_size + (of.routing.top_k + 3) * of.ffn_size
    scores = model.num_heads * min(tokens, workload.max_model_len)
    in_torch = tokens * (width * size + scores * 4)
    hidden = max(model.hidden_size, model.q_size)  # normalized rows, or attention's output
    width = sum(decoder_of(model).widths.values()) + model.q_size + hidden
    # KV of a prompt's earlier passes
    cached = 3 * model.kv_layout.position_bytes * workload.max_model_len
    rows = pass_tokens(workload, chunk_tokens) + workload.batch_size  # with those of a decode step
    in_kernels = rows * width * size + cached
    in_kernels += kv_staging_bytes(model, workload, chunk_tokens)
    if of := model.mixture:
        experts, top_k = of.routing.experts, of.routing.top_k
        in_kernels += sum(
            expert_buffer_bytes(
                n, experts=experts, top_k=top_k, hidden=model.hidden_size, ffn=of.ffn_size
            )
            # of passes with prompts, of decode steps, and of those with drafts
            for n in (rows, workload.batch_size, verified_tokens(workload))
            if n
        )
    logits, vocabulary = workload.batch_size * model.vocab_size, model.vocab_size
    tables = workload.batch_size * adjustment_bytes(workload.max_model_len, vocabulary)
    # Logits twice: those whose log-probabilities are wanted are copied.
    verified = verified_tokens(workload) * (width + 2 * vocabulary) * size
    if verified:
        texts = 4 * workload.batch_size * workload.max_model_len
        verified += texts + DRAFT_GRAPHS_BYTES
    return max(in_torch, in_kernels) + max(3 * logits * 4, 2 * logits * size + tables) + verified


def verified_tokens(workload: Workload) -> int:
    """Tokens of the largest step with drafts; 0 if there are none.

    Larger batches decode without drafts until they are small enough: beyond VERIFIED_TOKENS,
    products wait for arithmetic and not for memory.
    """
    width = 1 + workload.drafts
    return min(VERIFIED_TOKENS // width, workload.batch_size) * width if workload.drafts else 0


def adjustment_bytes(max_model_len: int, vocabulary: int) -> int:
    """Most bytes of the tokens that a request of up to `max_model_len` counts for penalties."""
    return BYTES_PER_ADJUSTED * min(max_model_len + MAX_BIASES, vocabulary)


def reserve_bytes(host_bytes: int) -> int:
    """Bytes of GPU memory kept for all that has no entry of its own in the plan.

    RESERVE_BYTES cover, in MiB measured on an H200, code of kernels (90), CUDA graphs (10),
    workspaces of products and of attention (up to 75) and rounding by torch's allocator (20 to
    80). While weights load, none of these is used yet, and temporary memory (up to 220) takes their
    place. In addition the driver needs page tables for `host_bytes` of page-locked memory.
    """
    return RESERVE_BYTES + ceil_div(host_bytes, HOST_BYTES_PER_PAGE_TABLE_BYTE)


def kv_staging_bytes(model: ModelConfig, workload: Workload, chunk_tokens: int) -> int:
    """Bytes of one layer's keys and values of a pass, staged on their way to remote slots."""
    return pass_tokens(workload, chunk_tokens) * model.kv_layout.position_bytes


def pass_tokens(workload: Workload, chunk_tokens: int) -> int:
    """Tokens of the largest pass, where passes have up to `chunk_tokens`."""
    return min(chunk_tokens, workload.batch_size * workload.max_model_len)


def _chances(matrix: Matrix, tokens: int) -> tuple[float, ...]:
    """Chances that a pass of `tokens` tokens reads each expert; empty for other matrices."""
    return tuple(matrix.chances(tokens)) if isinstance(matrix, Experts) else ()


def _bytes_read(matrix: Matrix, format: WeightFormat, tokens: int) -> float:
    """Bytes of `matrix` that a pass of `tokens` tokens is expected to read."""
    read = matrix.rows_read(tokens) * format.row_block_bytes(matrix.shape[1])
    return read // ROWS_PER_BLOCK if isinstance(read, int) else read / ROWS_PER_BLOCK
