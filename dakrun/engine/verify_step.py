"""Steps of a GPU whose rows carry drafts: what is launched, and what the host knows of them.

A step computes `width` tokens of a row: its newest one and its drafts. A kernel finds these in the
row's own text, or takes those that the host has proposed from the answers of the run so far.
Kernels accept them too, so steps run ahead of the CPU. Steps without drafts keep the same books.
Knows rows and slots, neither graphs nor requests.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from dakrun.drafts import DraftLengths, FileIndex
from dakrun.engine.decode_step import IDLE, LOG_STEPS, Bucket, DecodeStep
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.step import Accepted, Row, Sampling, Step
from dakrun.geometry import KV_BLOCK, WARPGROUPS
from dakrun.kernels import select_token, store_kv
from dakrun.kernels.attention import KVShape, prompt_attn
from dakrun.kernels.attention.prompt import part_queries
from dakrun.kernels.draft_tokens import (
    DraftBuffers,
    Outcome,
    SlotDrafts,
    SlotTexts,
    accept_drafts,
)
from dakrun.memory.device import upload
from dakrun.models.modules import Attention
from dakrun.plan import VERIFIED_TOKENS

PROPOSED_STEPS = 2  # whose tokens the host proposes: one is in flight before these can be used


class VerifyStep:
    """Buffers and launches of steps with up to `most` drafts a row, over the slots of `step`."""

    def __init__(
        self,
        step: DecodeStep,
        cache: KVCache,
        shape: KVShape,
        buckets: Sequence[Bucket],
        most: int,
    ) -> None:
        """`buckets` are those of steps; the ones in self.buckets are small enough for drafts."""
        config, device = step.backend.model.config, step.backend.like.device
        group = config.num_heads // config.num_kv_heads
        self.width = 1 + min(most, WARPGROUPS * part_queries(group) - 1)
        fit = [bucket for bucket in buckets if sum(bucket) * self.width <= VERIFIED_TOKENS]
        self.buckets = frozenset(fit)
        self.lengths = DraftLengths(cache.slots, self.width - 1)
        self._step, self._cache, self._shape = step, cache, shape
        proposed = PROPOSED_STEPS * self.width
        self._texts = SlotTexts.empty(step.newest, shape.blocks * KV_BLOCK, LOG_STEPS, proposed)
        self._index = FileIndex(cache.slots)
        self._proposals: np.ndarray | None = None  # of slots, each behind its slot's number
        self._tokens, self._outcomes = step.log.numpy(), self._texts.log.numpy()
        self._known: dict[int, tuple[Sampling, int]] = {}  # and the cached positions, by slot
        self._limits: dict[int, SlotDrafts] = {}
        self._by_match: list[int] = []
        rows = max(map(sum, fit), default=0)
        if rows:
            tokens = rows * self.width
            self.backend = step.backend.with_buffers(step.backend.staging, tokens)
            self._buffers = DraftBuffers(rows, self.width, shape, group, device)
            self._heads = step.backend.like.new_zeros(tokens, config.q_size)
            self.chosen = torch.zeros(tokens, dtype=torch.int32, device=device)

    def run(self, n: int) -> None:
        """Launch a step of the first n rows, with drafts."""
        step, drafts, tokens = self._step, self._buffers, n * self.width
        drafts.draft(
            step.lengths[:n], step.slots[:n], self._texts, step.sampling, self._cache.tables
        )
        ids, positions = drafts.tokens[:tokens], drafts.positions[:tokens]
        self.backend.model.forward(self.backend, partial(self._attend, n), ids, positions)
        select_token(
            self.backend.logits[:tokens], self.chosen[:tokens], positions, drafts.slots[:tokens],
            step.log, step.sampling, pdl=True,
        )  # fmt: skip
        accept_drafts(self.chosen[:tokens], positions, self._rows(n), self._texts, drafts)

    def keep(self, n: int) -> None:
        """Keep the books of a step of the first n rows that had no drafts."""
        rows = tokens, lengths, _ = self._rows(n)
        accept_drafts(tokens, lengths, rows, self._texts)

    def begin(self, rows: Sequence[Row], *, chosen: bool) -> None:
        """Take the texts of requests up to the ends of `rows`, whose tokens are all known.

        Where a step has `chosen` the token behind, it is the newest; else the row's last token is.
        """
        texts = self._texts
        for row in rows:
            known = row.sampling.history.last(row.last + 1)
            own = upload(torch.tensor(known, dtype=torch.int32), texts.text.device)
            texts.text[row.slot, : len(known)].copy_(own)
            if chosen:
                texts.text[row.slot, row.last + 1].copy_(texts.newest[row.slot])
            cached = row.last + chosen
            texts.cached[row.slot].fill_(cached)
            self.lengths.begin(row.slot)
            self._index.begin(row.slot, known)
            if not chosen:
                self._known[row.slot] = row.sampling, cached

    def limit(self, rows: Sequence[Row]) -> None:
        """Say how far the requests of decode `rows` may go, where this has changed."""
        changed = dict[int, SlotDrafts]()
        for row in rows:
            history, slot = row.sampling.history, row.slot
            end = len(history.prompt) + max(1, row.sampling.limit) - 1
            own = SlotDrafts(end, self._cache.room(slot), self.lengths.by_slot[slot])
            if self._limits.get(slot) != own:
                changed[slot] = own
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
        if self._proposals is not None:
            made = upload(torch.from_numpy(self._proposals), device)
            self._texts.proposals[made[:, 0]] = made[:, 1:]
            self._proposals = None

    def place(self, n: int) -> None:
        """Let the first n rows go on where their slots are, which only the device may know."""
        lengths, slots = self._step.lengths[:n], self._step.slots[:n]
        cached, ends = self._texts.cached[slots], self._texts.limits[slots, 0]
        lengths.copy_(cached.where((lengths >= 0) & (cached < ends), IDLE))

    def accepted(self, step: Step, chosen: Sequence[Sequence[int]]) -> Accepted:
        """What a step has accepted, once it has ended.

        `chosen` has the tokens behind the prompts' parts, of which decode rows have none.
        """
        count = len(step.decode)
        outcomes = [self._outcome(row) for row in step.decode]
        tokens: list[Sequence[int]] = []
        for row, (start, outcome) in zip(step.decode, outcomes, strict=True):
            log, places = self._tokens[row.slot], range(start, start + outcome.accepted)
            tokens.append([int(log[place % LOG_STEPS]) for place in places])
            if outcome.accepted:
                self._known[row.slot] = row.sampling, start + outcome.accepted
        self.lengths.learn(
            [row.slot for row in step.decode],
            [outcome.match for _, outcome in outcomes],
            [outcome.drafted for _, outcome in outcomes],
            [max(0, outcome.accepted - 1) for _, outcome in outcomes],
        )
        for row in step.prompts:
            if row.wanted:
                self._known[row.slot] = row.sampling, row.last + 1
        tokens += chosen[count:]
        self._propose(step.rows, tokens)
        return Accepted(tokens, drafted=[outcome.drafted for _, outcome in outcomes])

    def _propose(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> None:
        """Add the rows' new `tokens` to the index of all answers, and propose what may follow."""
        pairs = zip(rows, tokens, strict=True)
        new = {row.slot: own for row, own in pairs if own and min(own) >= 0}
        if not new:
            return
        slots = list(new)
        self._index.extend(slots, list(new.values()))
        matches, found = self._index.propose(slots, PROPOSED_STEPS * self.width)
        known = np.flatnonzero(matches)
        if len(known):
            at = [self._known[slots[number]][1] for number in known]
            made = (np.array(slots)[known], at, matches[known], *found[known].T)
            self._proposals = np.stack(made, axis=1).astype(np.int32)

    def _outcome(self, row: Row) -> tuple[int, Outcome]:
        """Where a decode row began, and its outcome; it is empty if the request had ended."""
        sampling, start = self._known.get(row.slot, (None, 0))
        end = len(row.sampling.history.prompt) + max(1, row.sampling.limit) - 1
        if sampling is not row.sampling or start >= end:
            return start, Outcome(0, 0, 0)
        return start, Outcome.of(int(self._outcomes[row.slot, start % LOG_STEPS]))

    def _rows(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._step.tokens[:n], self._step.lengths[:n], self._step.slots[:n]

    def _attend(self, n: int, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """Heads [n * width, Hq * D] of a fused projection; keys and values are stored."""
        drafts, layer, heads = self._buffers, attention.layer, self._heads[: len(qkv)]
        self.backend.normalize_heads(attention, qkv)
        q, _, _ = attention.split(qkv)
        joined = qkv.view(len(qkv), -1, attention.head_dim)
        store_kv(
            joined, drafts.positions[: len(qkv)], drafts.places[: len(qkv)], layer,
            kv_heads=attention.kv_heads, rotations=self.backend.rotations,
        )  # fmt: skip
        return prompt_attn(
            q, self._cache.tables, drafts.work(n), heads, scale=attention.scale, layer=layer
        )
