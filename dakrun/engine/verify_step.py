"""Steps of a GPU whose rows carry drafts: what is launched, and what the host knows of them.

A step computes several tokens of a row, equally many of each: its newest one and its drafts. A
kernel finds drafts in the row's own text, or takes drafts that the host has proposed from the
answers of the run so far. Kernels also accept drafts, so steps run ahead of the CPU. Steps without
drafts keep the same texts and lengths up to date on the GPU. Knows rows and slots, neither graphs
nor requests.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch

from dakrun.drafts import LEAST_CHANCE, DraftLengths, FileIndex
from dakrun.engine.decode_step import IDLE, LOG_STEPS, Bucket, DecodeStep, StepRows
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.slot_progress import SlotProgress, end_of
from dakrun.engine.step import Accepted, Row, Step
from dakrun.geometry import KV_BLOCK, LONGEST_MATCH, WARPGROUPS
from dakrun.kernels import select_in_order, select_token, store_kv
from dakrun.kernels.attention import KVShape, prompt_attn
from dakrun.kernels.attention.prompt import PromptWork, part_queries
from dakrun.kernels.draft_tokens import DraftBuffers, SlotDrafts, SlotTexts, accept_drafts
from dakrun.memory.device import upload
from dakrun.models.modules import Attention
from dakrun.plan import PROMPT_ENDS

Forced = tuple[int, Sequence[int]]  # tokens, behind the position of the first
PROPOSED_STEPS = 2  # whose tokens the host proposes: one is in flight before these can be used


class VerifyStep:
    """Buffers and launches of steps with drafts, over the slots of `step`."""

    def __init__(
        self,
        step: DecodeStep,
        cache: KVCache,
        shape: KVShape,
        widths: Mapping[Bucket, int],
        cost: float = LEAST_CHANCE,
    ) -> None:
        """`widths` has the tokens of a row by bucket, the smallest first; of some buckets only.

        See DraftLengths for `cost`. self.widths has as many of them as attention can have.
        """
        config, device = step.backend.model.config, step.backend.like.device
        group = config.num_heads // config.num_kv_heads
        most = WARPGROUPS * part_queries(group)
        self.widths = {bucket: min(width, most) for bucket, width in widths.items()}
        self.width = max(self.widths.values(), default=1)
        self.lengths = DraftLengths(self.width - 1, cost)
        self._step, self._cache, self._shape = step, cache, shape
        proposed = PROPOSED_STEPS * self.width
        self._texts = SlotTexts.empty(step.newest, shape.blocks * KV_BLOCK, LOG_STEPS, proposed)
        self._progress = SlotProgress(step.log.numpy(), self._texts.log.numpy())
        self._index = FileIndex(cache.slots)
        # Of slots, each behind its slot's number.
        self._proposals = np.empty((0, 3 + proposed), dtype=np.int32)
        self._sent: dict[int, Forced] = {}
        self._limits: dict[int, SlotDrafts] = {}
        self._by_match: list[int] = []
        if rows := max(map(sum, self.widths), default=0):
            tokens = max(sum(bucket) * width for bucket, width in self.widths.items())
            self._buffers = DraftBuffers(rows, self.width, shape, group, device)
            self.backend = step.backend.with_buffers(
                step.backend.staging, tokens + min(PROMPT_ENDS, cache.slots)
            )
            self._heads = step.backend.like.new_zeros(tokens, config.q_size)
            self.chosen = torch.zeros(tokens, dtype=torch.int32, device=device)

    def run(self, bucket: Bucket) -> None:
        """Launch a step of the rows of `bucket`, with drafts."""
        ids, positions, attend = self.draft(bucket)
        heads = self._heads[: len(ids)]
        logits = self.backend.model.forward(self.backend, attend(heads), ids, positions)
        self.accept(bucket, logits)

    def fits(self, bucket: Bucket, ends: int) -> bool:
        """Whether the logits of the rows of `bucket`, and of `ends` of prompts, have room."""
        return self.tokens(bucket) + ends <= len(self.backend.logits)

    def tokens(self, bucket: Bucket) -> int:
        """Tokens of the rows of `bucket`, which have drafts."""
        return sum(bucket) * self.widths[bucket]

    def draft(self, bucket: Bucket) -> StepRows:
        """Launch the choice of drafts of the rows of `bucket`; the tokens of these rows."""
        n, tokens = sum(bucket), self.tokens(bucket)
        step, drafts = self._step, self._buffers.of_width(self.widths[bucket])
        drafts.draft(step.lengths[:n], step.slots[:n], self._texts, self._cache.tables)
        ids, positions = drafts.tokens[:tokens], drafts.positions[:tokens]
        work = drafts.work(n)
        return StepRows(ids, positions, lambda heads: partial(self._attend, drafts, work, heads))

    def accept(self, bucket: Bucket, logits: torch.Tensor) -> None:
        """Launch the choice of tokens from `logits`, and keep those that drafts foresaw."""
        n, width, step = sum(bucket), self.widths[bucket], self._step
        drafts = self._buffers.of_width(width)
        ids, positions, slots, chosen = (
            own[: n * width] for own in (drafts.tokens, drafts.positions, drafts.slots, self.chosen)
        )
        select_token(
            logits, chosen, positions, slots, step.log, step.sampling, adjusts=False, pdl=True
        )
        select_in_order(logits, ids, chosen, positions, slots, step.log, step.sampling, width=width)
        accept_drafts(chosen, positions, self._first(n), self._texts, drafts)

    def keep(self, n: int) -> None:
        """Update texts and lengths after a step of the first n rows that had no drafts."""
        rows = tokens, lengths, _ = self._first(n)
        accept_drafts(tokens, lengths, rows, self._texts)

    def begin(self, rows: Sequence[Row], *, chosen: bool) -> None:
        """Copy the texts of the requests of `rows` to the GPU, up to the ends of the rows.

        The host knows these tokens. If a step has `chosen` the token behind them, that token is the
        newest; else the row's last token is.
        """
        if not rows:
            return
        texts, device = self._texts, self._texts.text.device
        width, every = texts.text.shape[1], texts.text.view(-1)
        known = [row.sampling.history.last(row.last + 1) for row in rows]
        tokens = np.fromiter(chain.from_iterable(known), dtype=np.int32)
        starts = [row.slot * width for row in rows]
        entries = [first + np.arange(len(own)) for first, own in zip(starts, known, strict=True)]
        at = upload(torch.from_numpy(np.concatenate(entries)), device)
        every[at] = upload(torch.from_numpy(tokens), device)
        columns = [[row.slot for row in rows], [row.last + chosen for row in rows], starts]
        columns.append([end_of(row) for row in rows])
        slots, cached, first, ends = upload(torch.tensor(columns), device)
        if chosen:
            every[first + cached] = texts.newest[slots]
        texts.cached[slots] = cached.int()
        texts.limits[slots, 0] = ends.int()
        for row in () if chosen else rows:
            self._know(row, row.last)

    def limit(self, rows: Sequence[Row], forced: Mapping[int, Forced]) -> None:
        """Tell the GPU how far the requests of decode `rows` may go with drafts, if that changed.

        Also send it the host's drafts: tokens that grammars have `forced`, by slot, or tokens from
        other answers.
        """
        changed = dict[int, SlotDrafts]()
        for row in rows:
            own = SlotDrafts(end_of(row), self._cache.room(row.slot))
            if self._limits.get(row.slot) != own:
                changed[row.slot] = own
        device = self._texts.limits.device
        if changed:
            self._limits |= changed
            slots = upload(torch.tensor(list(changed)), device)
            limits = torch.tensor(list(changed.values()), dtype=torch.int32)
            self._texts.limits[slots] = upload(limits, device)
        if self._by_match != self.lengths.by_match:
            self._by_match = list(self.lengths.by_match)
            made = torch.tensor(self._by_match, dtype=torch.int32)
            self._texts.by_match.copy_(upload(made, device))
        proposals = self._forced(rows, forced)
        if len(proposals):
            made = upload(torch.from_numpy(proposals), device)
            self._texts.proposals[made[:, 0].long()] = made[:, 1:]
        self._proposals = self._proposals[:0]

    def _forced(self, rows: Sequence[Row], forced: Mapping[int, Forced]) -> np.ndarray:
        """The proposals, with `forced` tokens that are new in place of others of their slots."""
        new = dict[int, Forced]()
        for row in rows if forced else ():
            own = forced.get(row.slot)
            if own is not None and own is not self._sent.get(row.slot):
                self._sent[row.slot] = new[row.slot] = own
        if not new:
            return self._proposals
        others = self._proposals[~np.isin(self._proposals[:, 0], list(new))]
        made = np.full((len(new), others.shape[1]), -1, dtype=np.int32)
        for line, (slot, (position, tokens)) in zip(made, new.items(), strict=True):
            line[:3] = slot, position - 1, LONGEST_MATCH
            line[3 : 3 + len(tokens)] = tokens[: len(line) - 3]
        return np.concatenate((others, made))

    def assign(self, n: int) -> None:
        """Set the first n rows' lengths to their slots', which only the device may know yet."""
        lengths, slots = self._step.lengths[:n], self._step.slots[:n].long()
        cached, ends = self._texts.cached[slots], self._texts.limits[slots, 0]
        lengths.copy_(cached.where((lengths >= 0) & (cached < ends), IDLE))

    def accepted(self, step: Step, chosen: Sequence[Sequence[int]]) -> Accepted:
        """What a step has accepted, once it has ended.

        `chosen` has the tokens behind each of its parts of prompts.
        """
        tokens, drafted, matches = self._progress.take(step.decode)
        if any(drafted):
            right = [max(0, len(own) - 1) for own in tokens]
            self.lengths.learn(matches, drafted, right)
        for row in step.prompts:
            if row.wanted:
                self._know(row, row.last + 1)
        found = [*tokens, *chosen]
        self._propose(step.rows, found)
        return Accepted(found, drafted=drafted)

    def _know(self, row: Row, cached: int) -> None:
        """Note that the row's request has the slot, `cached` positions in it; tokens are known."""
        self._progress.begin(row, cached)
        self._index.begin(row.slot, row.sampling.history.last(LONGEST_MATCH))

    def _propose(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> None:
        """Add the rows' new `tokens` to the index of all answers, and propose what may follow."""
        pairs = zip(rows, tokens, strict=True)
        new = {row.slot: own for row, own in pairs if own and min(own) >= 0}
        if not new:
            return
        slots = list(new)
        self._index.extend(slots, list(new.values()))
        fit = (width for bucket, width in self.widths.items() if sum(bucket) >= len(slots))
        if not (width := next(fit, 0)):
            return  # too many for drafts
        matches, found = self._index.propose(slots, PROPOSED_STEPS * width)
        known = np.flatnonzero(matches)
        if len(known):
            numbers = np.array(slots)[known]
            self._proposals = np.full((len(known), 3 + PROPOSED_STEPS * self.width), -1, np.int32)
            made = numbers, self._progress.cached[numbers], matches[known], *found[known].T
            self._proposals[:, : len(made)] = np.stack(made, axis=1)

    def _first(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, lengths and slots of the first n rows."""
        return self._step.tokens[:n], self._step.lengths[:n], self._step.slots[:n]

    def _attend(
        self,
        drafts: DraftBuffers,
        work: PromptWork,
        heads: torch.Tensor,
        attention: Attention,
        qkv: torch.Tensor,
    ) -> torch.Tensor:
        """`heads` [n * width, Hq * D] of a fused projection; keys and values are stored."""
        layer = attention.layer
        self.backend.normalize_heads(attention, qkv)
        q, _, _ = attention.split(qkv)
        joined = qkv.view(len(qkv), -1, attention.head_dim)
        store_kv(
            joined, drafts.positions[: len(qkv)], drafts.kv_addresses[: len(qkv)], layer,
            kv_heads=attention.kv_heads, rotations=self.backend.rotations,
        )  # fmt: skip
        return prompt_attn(q, self._cache.tables, work, heads, scale=attention.scale, layer=layer)
