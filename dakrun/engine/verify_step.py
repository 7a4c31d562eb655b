"""Steps of a GPU whose rows carry drafts: what is launched, and what the host knows of them.

A step computes several tokens of a row, equally many of each: its newest one and its drafts. A
kernel finds drafts in the row's own text and in an index of all answers of the run so far, or takes
those that a grammar has forced. Kernels also accept drafts, so steps run ahead of the CPU. Steps
without drafts keep the same texts and lengths up to date on the GPU. Knows rows and slots, neither
graphs nor requests.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch

from dakrun.drafts import LEAST_CHANCE, CommonToken, DraftLengths
from dakrun.engine.buckets import Bucket
from dakrun.engine.decode_step import IDLE, LOG_STEPS, DecodeStep, StepRows
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
FORCED_STEPS = 2  # whose tokens are sent ahead: one is in flight before these can be used


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
        self._cost = cost
        self._step, self._cache, self._shape = step, cache, shape
        self._texts = SlotTexts.empty(
            step.newest, shape.blocks * KV_BLOCK, LOG_STEPS, FORCED_STEPS * self.width
        )
        self.forget()
        if rows := max(map(sum, self.widths), default=0):
            tokens = max(sum(bucket) * width for bucket, width in self.widths.items())
            self._buffers = DraftBuffers(rows, self.width, shape, group, device)
            self.backend = step.backend.with_buffers(
                tokens + min(PROMPT_ENDS, cache.slots), step.backend.stagings
            )
            self._heads = step.backend.like.new_zeros(tokens, config.q_size)
            self.chosen = torch.zeros(tokens, dtype=torch.int32, device=device)

    def forget(self) -> None:
        """Forget all texts, and how good their drafts were; no step may be in flight."""
        texts = self._texts
        self.lengths, self._common = DraftLengths(self.width - 1, self._cost), CommonToken()
        self._progress = SlotProgress(self._step.log.numpy(), texts.log.numpy())
        self._sent: dict[int, Forced] = {}
        self._limits: dict[int, SlotDrafts] = {}
        self._by_match: list[int] = []
        self._sent_common = self._common.token
        texts.common.fill_(self._sent_common)
        texts.cached.zero_()
        texts.index.zero_()
        texts.steps.fill_(1)

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
        self._texts.steps.add_(1)
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
            self._progress.begin(row, row.last)

    def limit(self, rows: Sequence[Row], forced: Mapping[int, Forced]) -> None:
        """Tell the GPU how far the requests of decode `rows` may go with drafts, if that changed.

        Also send it the tokens that grammars have `forced`, by slot.
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
        if self._sent_common != self._common.token:
            self._sent_common = self._common.token
            self._texts.common.fill_(self._sent_common)
        new = {
            row.slot: forced[row.slot]
            for row in (rows if forced else ())
            if row.slot in forced and forced[row.slot] is not self._sent.get(row.slot)
        }
        if new:
            self._sent |= new
            lines = np.full((len(new), self._texts.proposals.shape[1]), -1, dtype=np.int32)
            for line, (position, tokens) in zip(lines, new.values(), strict=True):
                line[:2] = position - 1, LONGEST_MATCH
                line[2 : 2 + len(tokens)] = tokens[: len(line) - 2]
            slots = upload(torch.tensor(list(new)), device)
            self._texts.proposals[slots] = upload(torch.from_numpy(lines), device)

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
        self._common.learn(matches, tokens)
        if any(drafted):
            right = [max(0, len(own) - 1) for own in tokens]
            self.lengths.learn(matches, drafted, right)
        for row in step.prompts:
            if row.wanted:
                self._progress.begin(row, row.last + 1)
        return Accepted([*tokens, *chosen], drafted=drafted)

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
