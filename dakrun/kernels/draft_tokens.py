"""Drafts of a step's rows and their acceptance; wraps native/draft_tokens.cu and accept_drafts.cu.

Knows rows, slots and the texts in them; neither requests nor models.
"""

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dakrun.geometry import (
    DRAFT_MAX_TOKENS,
    DRAFT_THREADS,
    ELEMENTWISE_THREADS,
    LONGEST_MATCH,
    WARPGROUPS,
)
from dakrun.kernels.attention.kv_blocks import BlockTables, KVShape
from dakrun.kernels.attention.prompt import SPLIT_BLOCKS, PromptWork
from dakrun.kernels.attention.row_tiles import RowTiles
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.units import ceil_div

DRAFT, ACCEPT = "draft_tokens.cu", "accept_drafts.cu"
INDEX_ENTRIES = 1 << 20  # of 8 bytes


class SlotDrafts(NamedTuple):
    """How far a slot's drafts may go: SlotDrafts of native/slot_drafts.cuh.

    `end`: positions in the KV cache at the request's end, at most. `room`: positions with KV
    blocks.
    """

    end: int
    room: int


class Outcome(NamedTuple):
    """Of a row in a step: numbers of its new tokens and drafts, and the length of their match."""

    accepted: int
    drafted: int
    match: int

    @classmethod
    def of(cls, entry: int) -> "Outcome":
        """The outcome in an entry of the log."""
        return cls(*outcomes(entry))


def outcomes(entries: Any) -> tuple[Any, Any, Any]:
    """The fields of Outcome in entries of the log: an int, or an array of them."""
    return entries & 0xFF, entries >> 8 & 0xFF, entries >> 16


class _Index(ctypes.Structure):
    """DraftIndex of native/draft_index.cuh."""

    _fields_ = (*operands.pointers("entries", "steps"), *operands.ints("bits"))


class _DraftArgs(ctypes.Structure):
    _fields_ = (
        *operands.pointers("lengths", "slots", "text", "limits", "by_match", "common"),
        *operands.pointers("proposals", "tables", "tokens", "positions", "token_slots", "matches"),
        *operands.pointers("kv_addresses", "tiles"),
        ("index", _Index),
        *operands.fields(ctypes.c_int64, "layer_bytes", "head_bytes", "row_bytes"),
        *operands.ints(
            "text_size", "table_blocks", "proposal_size", "width", "max_splits", "split_blocks"
        ),
        *operands.ints("kv_heads", "group", "parts"),
    )


class _AcceptArgs(ctypes.Structure):
    _fields_ = (
        *operands.pointers("chosen", "tokens", "positions", "matches", "slots", "limits"),
        *operands.pointers("row_tokens", "lengths", "text", "newest", "cached", "log"),
        ("index", _Index),
        *operands.ints("rows", "width", "text_size", "depth"),
    )


@dataclass(frozen=True)
class SlotTexts:
    """What the device knows of the requests in slots.

    `text`, int32 [slots, positions], has their tokens by position, the newest included; `newest`
    int32 [slots]; `cached`, int32 [slots], their cached positions; `limits`, int32 [slots, 2], are
    SlotDrafts. `by_match`, int32 [LONGEST_MATCH + 1], has the most tokens to draft by the length of
    a match. `common`, int32 [1], is the first draft of a row without a match; negative: such a row
    has none. `proposals`, int32 [slots, 2 + n], may have tokens that follow the newest one at a
    position: that position, the length of their match, then the tokens, negative from their end on;
    they count as long as the text goes on as they say. `index`, int64 [2^n], are the entries of
    DraftIndex in native/draft_index.cuh, all zero if it is empty; `steps`, int32 [1], counts the
    steps that enter tokens in it: each step with drafts, and those that the caller adds. `log`,
    int32 [slots, depth] in page-locked memory, gets the Outcome of each row of a step that began at
    position p as entry p % depth.
    """

    text: torch.Tensor
    newest: torch.Tensor
    cached: torch.Tensor
    limits: torch.Tensor
    by_match: torch.Tensor
    common: torch.Tensor
    proposals: torch.Tensor
    index: torch.Tensor
    steps: torch.Tensor
    log: torch.Tensor

    @classmethod
    def empty(
        cls,
        newest: torch.Tensor,
        positions: int,
        depth: int,
        proposed: int,
        entries: int = INDEX_ENTRIES,
    ) -> "SlotTexts":
        """For slots of `positions` positions, the newest tokens of which are `newest`.

        With room for `proposed` proposed tokens of a slot, and for `entries` of the index, a power
        of two.
        """
        assert entries & (entries - 1) == 0, f"expected a power of two, got {entries}"
        slots, device = len(newest), newest.device
        return cls(
            torch.zeros(slots, positions + 1, dtype=torch.int32, device=device),
            newest,
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, len(SlotDrafts._fields), dtype=torch.int32, device=device),
            torch.zeros(LONGEST_MATCH + 1, dtype=torch.int32, device=device),
            torch.full((1,), -1, dtype=torch.int32, device=device),
            torch.zeros(slots, 2 + proposed, dtype=torch.int32, device=device),
            torch.zeros(entries, dtype=torch.int64, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            torch.zeros(slots, depth, dtype=torch.int32, pin_memory=newest.is_cuda),
        )

    def index_args(self) -> _Index:
        """The index as kernels take it."""
        entries, bits = self.index.data_ptr(), len(self.index).bit_length() - 1
        return _Index(entries, self.steps.data_ptr(), bits)


class DraftBuffers:
    """The tokens of up to `rows` rows of a step, `width` of each: the newest one and its drafts.

    `tokens`, `positions` (-1 of those that are not used) and `slots` are int32 [rows * width],
    `matches` int32 [rows], `kv_addresses` int64 [rows * width, 3] as store_kv() takes them.
    `rows` has the tiles of prompt attention.
    """

    def __init__(
        self, rows: int, width: int, shape: KVShape, group: int, device: torch.device
    ) -> None:
        assert width <= DRAFT_MAX_TOKENS, f"expected up to {DRAFT_MAX_TOKENS} tokens, got {width}"
        integers = torch.zeros(3, rows * width, dtype=torch.int32, device=device)
        self.tokens, self.positions, self.slots = integers
        self.matches = torch.zeros(rows, dtype=torch.int32, device=device)
        self.width, self.rows = width, RowTiles(rows, width, shape, group, device)
        self.kv_addresses = self.rows.kv_addresses

    def of_width(self, width: int) -> "DraftBuffers":
        """The same buffers for rows of fewer tokens: the first rows * width elements of each."""
        found = copy.copy(self)
        found.width, found.rows = width, self.rows.of_width(width)
        return found

    def work(self, rows: int) -> PromptWork:
        """The work of prompt attention of the first `rows` rows."""
        return self.rows.work(rows)

    def draft(
        self,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        texts: SlotTexts,
        tables: BlockTables,
    ) -> None:
        """Draft tokens of rows of `slots`, int32 [n], with `lengths` cached positions.

        A row whose length is negative, or at its slot's end, gets no token.
        Raises ValueError if an operand has the wrong shape, dtype or device.
        """
        n, count = len(lengths), len(texts.text)
        operands.check_operands(
            lengths.device,
            {
                "lengths": (lengths, (n,), torch.int32),
                "slots": (slots, (n,), torch.int32),
                "text": (texts.text, (count, texts.text.shape[1]), torch.int32),
                "limits": (texts.limits, (count, len(SlotDrafts._fields)), torch.int32),
                "by_match": (texts.by_match, (LONGEST_MATCH + 1,), torch.int32),
                "common": (texts.common, (1,), torch.int32),
                "proposals": (texts.proposals, (count, texts.proposals.shape[1]), torch.int32),
                "tables": (tables.addresses, (count, tables.addresses.shape[1]), torch.int64),
            },
        )
        operands.check_gpu(lengths.device)
        args = _DraftArgs(
            lengths=lengths.data_ptr(),
            slots=slots.data_ptr(),
            text=texts.text.data_ptr(),
            limits=texts.limits.data_ptr(),
            by_match=texts.by_match.data_ptr(),
            common=texts.common.data_ptr(),
            proposals=texts.proposals.data_ptr(),
            tables=tables.addresses.data_ptr(),
            tokens=self.tokens.data_ptr(),
            positions=self.positions.data_ptr(),
            token_slots=self.slots.data_ptr(),
            matches=self.matches.data_ptr(),
            kv_addresses=self.kv_addresses.data_ptr(),
            tiles=self.rows.tiles.data_ptr(),
            index=texts.index_args(),
            layer_bytes=tables.layer_bytes,
            head_bytes=tables.head_bytes,
            row_bytes=self.rows.shape.layout.row_bytes,
            text_size=texts.text.shape[1],
            table_blocks=tables.addresses.shape[1],
            proposal_size=texts.proposals.shape[1],
            width=self.width,
            max_splits=self.rows.splits(n),
            split_blocks=SPLIT_BLOCKS,
            kv_heads=self.rows.shape.kv_heads,
            group=self.rows.group,
            parts=WARPGROUPS,
        )
        jit.kernel(DRAFT, "draft_tokens", {}).launch(n, DRAFT_THREADS, args)


def accept_drafts(
    chosen: torch.Tensor,
    positions: torch.Tensor,
    rows: Sequence[torch.Tensor],
    texts: SlotTexts,
    drafts: DraftBuffers | None = None,
) -> None:
    """Keep the `chosen` tokens, int32 [n * width], of a step's rows as far as drafts foresaw them.

    They also enter the index.

    `positions`, int32 [n * width], are those of the chosen tokens, 0 or less where there is none.
    `rows` are the tokens, lengths and slots of the rows, int32 [n]: tokens and lengths are replaced
    by the newest ones, lengths of requests at their ends by -1. Without `drafts` the width is 1.
    Raises ValueError if an operand has the wrong shape, dtype or device.
    """
    tokens, lengths, slots = rows
    n, width = len(slots), 1 if drafts is None else drafts.width
    operands.check_operands(
        slots.device,
        {
            "chosen": (chosen, (n * width,), torch.int32),
            "positions": (positions, (n * width,), torch.int32),
            "tokens": (tokens, (n,), torch.int32),
            "lengths": (lengths, (n,), torch.int32),
            "slots": (slots, (n,), torch.int32),
        },
    )
    operands.check_gpu(slots.device)
    args = _AcceptArgs(
        chosen=chosen.data_ptr(),
        tokens=0 if drafts is None else drafts.tokens.data_ptr(),
        positions=positions.data_ptr(),
        matches=0 if drafts is None else drafts.matches.data_ptr(),
        slots=slots.data_ptr(),
        limits=texts.limits.data_ptr(),
        row_tokens=tokens.data_ptr(),
        lengths=lengths.data_ptr(),
        text=texts.text.data_ptr(),
        newest=texts.newest.data_ptr(),
        cached=texts.cached.data_ptr(),
        log=texts.log.data_ptr(),
        index=texts.index_args(),
        rows=n,
        width=width,
        text_size=texts.text.shape[1],
        depth=texts.log.shape[1],
    )
    kernel = jit.kernel(ACCEPT, "accept_drafts", {})
    kernel.launch(ceil_div(32 * n, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, args)


@compiled_ahead(DRAFT)
@compiled_ahead(ACCEPT)
def _variants(needs: Needs) -> list[Macros]:
    return [{}] if needs.every else []
