"""The model in plain torch, one step at a time on any device: the reference, and the CPU's runner.

Knows rows and slots; reference_backend.py has the ops, whose order is the decoder's.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from dakrun.drafts import Drafter
from dakrun.engine.acceptance import accept
from dakrun.engine.expert_moves import ExpertMoves
from dakrun.engine.expert_use import ExpertUse
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.kv_layout import RowLayout
from dakrun.engine.logprobs import Scores
from dakrun.engine.reference_backend import ReferenceBackend, TimedBackend
from dakrun.engine.runner import Chosen
from dakrun.engine.step import Accepted, Row, Step
from dakrun.geometry import KV_BLOCK
from dakrun.grammars import Guide
from dakrun.kernels import reference
from dakrun.models.decoder import Attend, Decoder
from dakrun.models.experts import routers
from dakrun.models.functional import rms_norm, rope_table, rotate
from dakrun.models.modules import Attention
from dakrun.plan import PREFILL_CHUNK_TOKENS, DraftForecast
from dakrun.units import ceil_div
from dakrun.weights.loading import Weights

Rotations = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [N, 1, D / 2]
# Logits for scores are computed this many at a time, in the memory that the pass before needed.
SCORED_LOGITS = 2**24


class ReferenceAttention:
    """Attention of a step's `rows`, the first `decode` of which are decode rows.

    `rope` are the rotations of the rows' positions, or None for learned positions; `vectors` has
    the weights of norms of query and key heads by name, if there are any.
    """

    def __init__(
        self,
        eps: float,
        cache: KVCache,
        layout: RowLayout,
        rows: Sequence[Row],
        rope: Rotations | None,
        vectors: Mapping[str, torch.Tensor],
        *,
        decode: int,
    ) -> None:
        self._eps, self._cache, self._layout, self._vectors = eps, cache, layout, vectors
        self._rows, self._rope, self._decode = rows, rope, decode

    def __call__(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """Heads [n, Hq * D] of a fused projection [n, (Hq + 2 Hkv) * D], whose K, V are cached."""
        layer, scale = attention.layer, attention.scale
        q, k, v = attention.split(qkv)
        if attention.norms:
            q, k = (
                self._normalize(heads, self._vectors[weight.name])
                for heads, weight in zip((q, k), attention.norms, strict=True)
            )
        if self._rope is not None:
            q, k = rotate(q, *self._rope), rotate(k, *self._rope)
        q = q.contiguous()
        first = 0
        for row in self._rows:
            self._store(layer, row, *(x[first : first + row.length] for x in (k, v)))
            first += row.length
        heads, queries = [], q.split([row.length for row in self._rows])
        for number, (row, own) in enumerate(zip(self._rows, queries, strict=True)):
            cache = self._cached(layer, row)
            if number < self._decode and row.length == 1:
                heads.append(reference.decode_attention(own, [cache], scale))
            else:
                heads.append(reference.prefill_attention(own, cache, scale))
        return torch.cat(heads)

    def _normalize(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The RMSNorm of each head of [n, H, D], or of all of them, as `weight` has columns."""
        rows = heads.flatten(1).unflatten(1, (-1, len(weight)))
        return rms_norm(rows, weight, self._eps).view(heads.shape)

    def _store(self, layer: int, row: Row, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [T, Hkv, D] of a row's tokens to its slot's blocks."""
        done = 0
        while done < row.length:
            number, first = divmod(row.start + done, KV_BLOCK)
            count = min(KV_BLOCK - first, row.length - done)
            block = self._layout.view(self._cache.block(row.slot, number)[layer])
            for part, new in zip(block, (keys, values), strict=True):
                part[first : first + count] = new[done : done + count]
            done += count

    def _cached(self, layer: int, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values [Hkv, P, D] of a slot's positions, the row's included."""
        count = row.last + 1
        found = self._cache.gather(layer, row.slot, ceil_div(count, KV_BLOCK))
        blocks = self._layout.view(found)
        keys, values = blocks.transpose(0, 1).flatten(1, 2)[:, :count].transpose(1, 2)
        return keys, values


class ReferenceRunner:
    """A runner in plain torch: a step is done when `launch` returns."""

    ahead = 1
    moves_experts = True
    chunk_tokens = PREFILL_CHUNK_TOKENS

    def __init__(
        self,
        model: Decoder,
        weights: Weights,
        cache: KVCache,
        layout: RowLayout,
        max_model_len: int,
    ) -> None:
        self.order: Sequence[int] = range(cache.slots)
        self._model, self.cache, self._layout = model, cache, layout
        self._device = cache.device
        self.expert_use = ExpertUse(model) if routers(model) else None
        self._moves = ExpertMoves(self.expert_use, weights.matrices) if self.expert_use else None
        backend = ReferenceBackend(model, weights, self.expert_use)
        self._timed = TimedBackend(backend) if cache.device.type == "cpu" else None
        self.weights = weights
        self._backend = backend
        self._rope: Rotations | None = None
        if any(attention.rotary for attention in model.attentions):
            dtype = getattr(torch, model.config.dtype)
            cos, sin = rope_table(model.config, max_model_len, dtype)
            self._rope = cos.to(cache.device), sin.to(cache.device)
        self._steps = 0
        self._newest: dict[int, int] = {}  # token by slot
        self._guides: dict[int, Guide] = {}  # by slot
        self._accepted: deque[Accepted] = deque()  # by step
        self.drafter: Drafter | None = None

    def rehearse(self) -> None:
        """Nothing costs more the first time."""

    def op_seconds(self, length: int) -> Mapping[str, float]:
        """Seconds by op, the mean of all steps so far, on a CPU."""
        del length
        found = self._timed.seconds if self._timed else {}
        return {op: total / self._steps for op, total in found.items()}

    def details(self) -> dict[str, Any]:
        """The experts that were exchanged, in a model that has any."""
        return {"expert_moves": self._moves.report()} if self._moves else {}

    def draft(self, forecasts: Sequence[DraftForecast]) -> None:
        """Prepare for steps that carry as many drafted tokens of a row as `forecasts` say."""
        most = max(one.drafts for one in forecasts)
        self.drafter = Drafter(self.cache.slots, most, forecasts[-1].cost)

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Compute a step."""
        if self._moves and self.moves_experts:
            self._moves.between_steps()
        step = self._drafted(step)
        logits, scores = self.logits(step)
        timed = self._timed if not step.prompts else None
        self._steps += not step.prompts
        with timed.timer("sampling") if timed else nullcontext():
            for row in step.prompts:
                self._begin_guide(row)
            tokens = accept(logits, step.choosing, self._guides)
            accepted = self._read(logits, step, tokens)
        if scores is not None:
            accepted = accepted._replace(scores=scores.collect())
        self._accepted.append(accepted)
        for row, new in zip(step.choosing, tokens, strict=True):
            self._newest[row.slot] = max(new[-1], 0)  # NO_TOKEN has no embedding
        self._learn(step, tokens)

    def _drafted(self, step: Step) -> Step:
        """The step with drafts in its decode rows, as far as there are any."""
        if not any(row.length > 1 for row in step.decode):
            return step
        assert self.drafter is not None, "expected draft() before rows with drafts"
        forced = {
            row.slot: self._guides[row.slot].forced()
            for row in step.decode
            if row.sampling.guidance is not None
        }
        slots = [row.slot for row in step.decode]
        drafts = self.drafter.propose(slots, [row.length - 1 for row in step.decode], forced)
        rows = [
            row._replace(length=1 + len(tokens), wanted=1 + len(tokens), tokens=tokens)
            for row, tokens in zip(step.decode, drafts, strict=True)
        ]
        return step._replace(decode=rows)

    def _read(self, logits: torch.Tensor, step: Step, tokens: Sequence[Sequence[int]]) -> Accepted:
        """What a step has accepted: `tokens` of its rows `choosing`, and what else is asked for."""
        rows, counts = step.choosing, [len(new) for new in tokens]
        if sum(counts) < len(logits):
            firsts = accumulate((row.wanted for row in rows), initial=0)
            kept = [first + i for first, n in zip(firsts, counts, strict=False) for i in range(n)]
            logits = logits[kept]
        chosen = torch.tensor([token for new in tokens for token in new], device=self._device)
        accepted = Chosen(logits, step, chosen, counts).collect()
        if self.drafter is None:
            return accepted
        return accepted._replace(drafted=[len(row.tokens) for row in step.decode])

    def _learn(self, step: Step, tokens: Sequence[Sequence[int]]) -> None:
        """Tell the drafter which tokens were accepted for the rows `choosing`."""
        if self.drafter is None:
            return
        count = len(step.decode)
        self.drafter.learn([row.slot for row in step.decode], tokens[:count])
        for row, new in zip(step.choosing[count:], tokens[count:], strict=True):
            self.drafter.begin(row.slot, [*row.sampling.history.last(row.last + 1), *new])

    def resume(self, row: Row) -> None:
        """Let the token of `row` be the newest of its slot."""
        (self._newest[row.slot],) = row.tokens
        self._begin_guide(row)
        if self.drafter is not None:
            self.drafter.begin(row.slot, row.sampling.history.last(row.last + 1))

    def tokens_beside(self, slots: Sequence[int], width: int) -> int:
        """Tokens of the rows of `slots`, of `width` tokens each."""
        return len(slots) * width

    def has_ended(self) -> bool:
        """No device waits: steps are computed in `launch`."""
        return False

    def collect(self) -> Accepted:
        """The tokens accepted in the oldest step."""
        return self._accepted.popleft()

    def drop(self) -> None:
        """Forget the tokens of all steps."""
        self._accepted.clear()

    def _begin_guide(self, row: Row) -> None:
        """Let a request's tokens be guided from where the row ends, if it wants that."""
        guidance = row.sampling.guidance
        if guidance is not None and row.wanted:
            self._guides[row.slot] = guidance.guide(row.sampling.history.tokens)

    @torch.inference_mode()
    def logits(self, step: Step) -> tuple[torch.Tensor, Scores | None]:
        """Logits [S, V] after the wanted tokens of a step's rows; scores, if tokens are `scored`.

        A row whose `tokens` are fewer than its `length` begins with the newest token of its slot.
        """
        rows, ids, positions, wanted = step.rows, list[int](), list[int](), list[int]()
        if self.expert_use:
            self.expert_use.begin_step(len(step.decode), prompts=bool(step.prompts))
        for row in rows:
            if len(row.tokens) < row.length:
                ids.append(self._newest[row.slot])
            ids += row.tokens
            positions += range(row.start, row.last + 1)
            wanted += range(len(ids) - row.wanted, len(ids))
        tokens, at = (torch.tensor(numbers, device=self._device) for numbers in (ids, positions))
        rope = None if self._rope is None else (self._rope[0][at, None], self._rope[1][at, None])
        attend: Attend = ReferenceAttention(
            self._model.config.norm_eps,
            self.cache,
            self._layout,
            rows,
            rope,
            self.weights.resident,
            decode=len(step.decode),
        )
        if not step.prompts:
            if self._timed:
                logits = self._model.forward(self._timed, self._timed.timed(attend), tokens, at)
                return logits, None
            return self._model.forward(self._backend, attend, tokens, at), None
        chosen = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        model, run = self._model, self._backend
        hidden = model.hidden(run, attend, tokens, at)
        logits = model.logits(run, hidden[chosen])
        if not any(row.scored for row in step.prompts):
            return logits, None
        of_prompts = hidden[sum(row.length for row in step.decode) :]
        most = max(1, SCORED_LOGITS // model.head.width)
        return logits, Scores(step, of_prompts, partial(model.logits, run), most)
