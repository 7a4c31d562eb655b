"""A decode step on the GPU's kernels: from the rows' newest tokens to their next ones.

A row of the batch is a slot's newest token. Knows batch buckets and the rows' buffers on the
device, neither graphs nor requests.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from dakrun.engine.buckets import Bucket
from dakrun.engine.kernel_backend import KernelBackend
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.staging import PassStaging
from dakrun.engine.step import Step
from dakrun.geometry import MAX_GROUP_HEADS
from dakrun.kernels import SAMPLING_WORDS, select_token, store_kv
from dakrun.kernels.attention import (
    AttentionConfig,
    AttentionWorkspace,
    KVShape,
    PrefixAttention,
    RowGroup,
    RowTiles,
    attention_config,
    list_items,
    prompt_attn,
    splitk_flash_attn,
)
from dakrun.kernels.runtime import card_of
from dakrun.launches import TierAccess
from dakrun.memory.device import upload
from dakrun.models.decoder import Attend
from dakrun.models.experts import Experts
from dakrun.models.modules import Attention, Embedding, Fused, Linear, without

LOG_STEPS = 128  # newest tokens of a slot in the log for the CPU: more than steps in flight choose
IDLE = -1  # the length of a row without a request


class StepRows(NamedTuple):
    """Tokens of a step's rows, which may share a pass with prompts.

    `ids` and `positions` are int32 [n]; `attend` makes attention that writes to heads [n, Hq * D],
    and launches what it needs: call it ahead of the pass's first product.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    attend: Callable[[torch.Tensor], Attend]


class DecodeStep:
    """Buffers and launches of decode steps over the slots of `cache`.

    A step computes the first rows, ordered by tier, as many as its bucket has. The device holds
    for each row: `tokens` and `slots` (int32); `lengths` (int32), the cached positions of the
    slot; `spilled` (int32), the slot's leading KV blocks in the first remote tier, where slots span
    tiers; and after a step `backend.logits` [rows, V]. A slot's block table has a block for the new
    position, too. A step that attends from position p of a slot also writes the token
    that it chooses to log[slot, p % LOG_STEPS] and newest[slot]; `log` is int32 [slots, LOG_STEPS]
    in page-locked memory, `newest` int32 [slots] on the device. `sampling` (int32 [slots, words])
    says how tokens of each slot are chosen. If rows share prefixes (`cascades`), attention reads
    these once for all of them. With more query heads per KV head than SplitK_FlashAttn takes,
    prompt attention attends from the rows, and each row reads a shared prefix for itself.
    """

    def __init__(
        self,
        backend: KernelBackend,
        cache: KVCache,
        shape: KVShape,
        accesses: Sequence[TierAccess],
    ) -> None:
        """All rows are idle; `accesses` says how attention reads the tiers."""
        self.backend, self._cache, self._shape = backend, cache, shape
        self._accesses = tuple(accesses)
        batch, like = cache.slots, backend.like
        integers = torch.zeros(5, batch, dtype=torch.int32, device=like.device)
        self.tokens, self.newest, self.slots, self.lengths, self.spilled = integers
        self._mapped = integers[2:]
        self.lengths.fill_(IDLE)
        self.log = torch.zeros(batch, LOG_STEPS, dtype=torch.int32, pin_memory=like.is_cuda)
        self.sampling = torch.zeros(batch, SAMPLING_WORDS, dtype=torch.int32, device=like.device)
        self._heads = like.new_empty(batch, backend.model.config.q_size)
        self._configs: dict[Bucket, AttentionConfig] = {}
        config = backend.model.config
        group = config.num_heads // config.num_kv_heads
        self._tiles: RowTiles | None = None
        if group > MAX_GROUP_HEADS:
            self._tiles = RowTiles(batch, 1, shape, group, like.device, alike=True)
        self.cascades = False

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Choose the attention kernel's configurations for `buckets`; allocate their workspace."""
        if self._tiles:
            return
        device, model = self.backend.like.device, self.backend.model.config
        self._configs = {
            bucket: attention_config(
                self._shape, bucket, self._accesses, card=card_of(device),
                capacity=self._cache.slots, alone=self.backend.one_cta_per_sm(sum(bucket)),
                reads_spilled=self._cache.spill_blocks > 0,
            )
            for bucket in buckets
        }  # fmt: skip
        group = model.num_heads // model.num_kv_heads
        self._workspace = AttentionWorkspace.empty(self._configs.values(), group, device)
        self._prefixes = PrefixAttention(
            self._cache.slots, self._shape, group, device, remote=any(self._cache.counts[1:])
        )

    def assign(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        groups: Sequence[RowGroup] | None = None,
    ) -> None:
        """Let the first rows be of `slots` with `lengths` cached positions, or IDLE.

        Their tokens become the newest of these slots. `groups` of them share prefixes; None: the
        same as before.
        """
        if groups is not None:
            self.cascades = bool(groups) and not self._tiles
            if self.cascades:
                self._prefixes.assign(groups)
        n = len(slots)
        spilled = [
            0 if n == IDLE else self._cache.spilled(s) for s, n in zip(slots, lengths, strict=True)
        ]
        rows = torch.tensor([slots, lengths, spilled], dtype=torch.int32)
        mapped = upload(rows, self.tokens.device)
        self._mapped[:, :n].copy_(mapped)
        torch.index_select(self.newest, 0, self.slots[:n], out=self.tokens[:n])

    def run(self, bucket: Bucket) -> None:
        """Launch a step of a prepared bucket."""
        n = sum(bucket)
        self.backend.model.forward(
            self.backend, self.attention(bucket), self.tokens[:n], self.lengths[:n]
        )
        self.select(n, self.backend.logits[:n])

    def rows(self, bucket: Bucket) -> StepRows:
        """The rows of a prepared bucket, for a pass that they share with prompts."""
        n = sum(bucket)
        return StepRows(self.tokens[:n], self.lengths[:n], partial(self.attention, bucket))

    def attention(self, bucket: Bucket, heads: torch.Tensor | None = None) -> Attend:
        """Attention of the rows of a prepared bucket; `heads` [rows, Hq * D] takes the output.

        Launches list_items(), which must end before the first product of the step starts.
        """
        n = sum(bucket)
        out = self._heads[:n] if heads is None else heads
        if self._tiles:
            return partial(self._attend_from_tiles, self._tiles, out)
        config = self._configs[bucket]
        list_items(
            self.lengths[:n], config, self._workspace, table_of=self.slots[:n],
            prefixes=self._prefixes if self.cascades else None,
            spilled=self.spilled[:n] if config.reads_spilled else None,
        )  # fmt: skip
        return partial(self._attend, config, out)

    def chains(
        self, bucket: Bucket, leave_out: Fused | None = None
    ) -> dict[str, list[Callable[[], object]]]:
        """Launch a step of a prepared bucket; return its launches of all layers, by op.

        Matrices are not staged. An op's launches may be repeated, to time them alone. With
        `leave_out` they are those of the ops that have this part, without it.
        """
        n, backend = sum(bucket), self.backend.staged_by(PassStaging())
        backend.expert_use = None  # the tokens are no request's
        self.cascades = False
        recorder = _Recorder(backend, leave_out)
        attention = recorder.recorded(self.attention(bucket))
        backend.model.forward(recorder, attention, self.tokens[:n], self.lengths[:n])
        logits = self.backend.logits[:n]
        self.select(n, logits)
        if leave_out is None:
            recorder.launches["sampling"].append(partial(self.select, n, logits))
        backend.begin(n)  # buffers for repeated launches: forward's end() has dropped them
        return recorder.launches

    def _attend(
        self, config: AttentionConfig, out: torch.Tensor, attention: Attention, qkv: torch.Tensor
    ) -> torch.Tensor:
        n, layer, scale = len(qkv), attention.layer, attention.scale
        q, k, v = attention.split(qkv)
        lengths = self.lengths[:n]
        rotations = self.backend.rotations if attention.rotary else None
        prefixes, norms = None, self.backend.head_norms(attention)
        if self.cascades or attention.norms_all_heads:
            self.backend.normalize_heads(attention, qkv)
            norms = None
        if self.cascades:
            prefixes = self._prefixes
            prefixes.launch(q, lengths, scale=scale, layer=layer, rotations=rotations, pdl=True)
            config = replace(config, alone=True)  # the launch before fills SMs
        return splitk_flash_attn(
            q, k, v, self._cache.tables, lengths, config, self._workspace, out, scale=scale,
            layer=layer, table_of=self.slots[:n], rotations=rotations, prefixes=prefixes,
            spilled=self.spilled[:n] if config.reads_spilled else None, head_norms=norms, pdl=True,
        )  # fmt: skip

    def _attend_from_tiles(
        self, tiles: RowTiles, out: torch.Tensor, attention: Attention, qkv: torch.Tensor
    ) -> torch.Tensor:
        n, layer = len(qkv), attention.layer
        if layer == 0:  # the same for all layers
            tiles.assign(self.lengths[:n], self.slots[:n], self._cache.tables, pdl=True)
        self.backend.normalize_heads(attention, qkv)
        q, _, _ = attention.split(qkv)
        store_kv(
            qkv.view(n, -1, attention.head_dim), self.lengths[:n], tiles.kv_addresses[:n], layer,
            kv_heads=attention.kv_heads, rotations=self.backend.rotations, pdl=True,
        )  # fmt: skip
        return prompt_attn(
            q, self._cache.tables, tiles.work(n), out, scale=attention.scale, layer=layer, pdl=True
        )

    def select(self, n: int, logits: torch.Tensor) -> None:
        """Choose the token of the first n rows, log it, and advance their lengths."""
        select_token(
            logits, self.tokens[:n], self.lengths[:n], self.slots[:n], self.log, self.sampling,
            self.newest, pdl=True,
        )  # fmt: skip

    def logged(self, step: Step) -> Sequence[Sequence[int]]:
        """The tokens that a step has chosen, for each of its rows; its launches must have ended."""
        entries = [row.slot * LOG_STEPS + row.start % LOG_STEPS for row in step.decode]
        ends = (row for row in step.prompts if row.wanted)
        entries += (row.slot * LOG_STEPS + row.last % LOG_STEPS for row in ends)
        chosen = self.log.take(torch.tensor(entries, dtype=torch.int64)).tolist()
        return step.by_row(list(zip(chosen, strict=True)))

    def first_tokens(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Choose and log the tokens, int32 [n], after prompts that end at `positions` of `slots`.

        Both are int32 [n]; positions are advanced.
        """
        tokens = torch.empty_like(slots)
        if logits.data_ptr() % 16:  # rows of an odd vocabulary behind others
            logits = logits.clone()
        return select_token(logits, tokens, positions, slots, self.log, self.sampling, self.newest)


class _Recorder:
    """A backend that launches each op, and records the launch in `launches` by op of the plan.

    With `leave_out` it records launches without this part, of the ops that have it.
    """

    def __init__(self, backend: KernelBackend, leave_out: Fused | None) -> None:
        self._backend, self._leave_out = backend, leave_out
        self.begin, self.end, self.route = backend.begin, backend.end, backend.route
        self.launches: dict[str, list[Callable[[], object]]] = defaultdict(list)

    def embed(
        self, embedding: Embedding, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._launch("embedding", self._backend.embed, embedding, tokens, positions)

    def linear(self, linear: Linear, *operands: torch.Tensor | None) -> torch.Tensor:
        return self._launch(linear.op, self._backend.linear, linear, *operands)

    def experts(self, experts: Experts, *operands: Any) -> torch.Tensor:
        return self._launch(experts.op, self._backend.experts, experts, *operands)

    def recorded(self, attend: Attend) -> Attend:
        return lambda attention, qkv: self._launch(attention.op, attend, attention, qkv)

    def _launch(
        self, op: str, launch: Callable[..., torch.Tensor], module: object, *operands: object
    ) -> torch.Tensor:
        recorded = without(module, self._leave_out) if self._leave_out else module
        if recorded is not None:
            self.launches[op].append(partial(launch, recorded, *operands))
        return launch(module, *operands)
