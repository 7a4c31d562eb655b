"""Prefill on the GPU: prompts through the layers, their keys and values into KV blocks.

Knows a step's parts of prompts, which may share the pass with decode rows. The backend computes
products. kv_writer.py stores keys and values; prompt_attention.py attends to them. A CPU launches
small passes op by op more slowly than the GPU computes them, so these are replays of CUDA graphs,
captured as passes of their size come (pass_graphs.py).
"""

from collections.abc import Hashable, Sequence
from functools import partial
from itertools import accumulate, islice

import torch
import torch.nn.functional as F

from dakrun.engine.decode_step import IDLE, StepRows
from dakrun.engine.kernel_backend import KernelBackend
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.kv_writer import KVWriter
from dakrun.engine.logprobs import Scores
from dakrun.engine.pass_graphs import PassGraphs, PassInputs
from dakrun.engine.prompt_attention import PromptAttention
from dakrun.engine.step import Row, Step
from dakrun.geometry import GRAPHED_TOKENS, padded_tokens
from dakrun.kernels.attention import KVShape
from dakrun.memory.device import upload
from dakrun.models.decoder import Attend
from dakrun.models.modules import Attention


class Prefill:
    """Runs prompts of a model whose slots are in `cache`, in passes of up to `chunk_tokens`.

    `room`, uint8 in HBM, holds keys and values of remote slots until they are copied to the slots.
    """

    def __init__(
        self,
        backend: KernelBackend,
        cache: KVCache,
        shape: KVShape,
        room: torch.Tensor,
        chunk_tokens: int,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._backend, self._cache, self._shape = backend, cache, shape
        self._scoring: KernelBackend | None = None  # for the head alone, which nothing stages
        self._heads = backend.like.new_empty(backend.rows, backend.model.config.q_size)
        self._writer = KVWriter(cache, shape, room)
        self._graphs = PassGraphs(GRAPHED_TOKENS, backend.like.device)

    def logits(
        self,
        parts: Sequence[Row],
        rows: StepRows | None = None,
        logits: torch.Tensor | None = None,
        launches: Hashable = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [S, V] after the wanted tokens of `parts` of prompts.

        The tokens of a decode step's `rows` go through the layers with them; their logits come
        first. `logits` is room for them all, by default it is allocated. Also returns the last
        layer's output [T, H] after all tokens of `parts`, for `scores`.

        `launches` says which kernels `rows` launch. If it and the padded numbers of tokens and
        logits equal those of earlier passes, a graph may be replayed; with None it is not. The next
        pass overwrites the layer's output, and after a small pass the logits.
        """
        n, tokens = len(rows.ids) if rows else 0, sum(row.length for row in parts)
        wanted, total = n + sum(row.wanted for row in parts), self.padded(n + tokens)
        small = total <= GRAPHED_TOKENS and total == padded_tokens(total)
        # Log-probabilities of prompts' tokens overwrite the idle buffer.
        scored = any(row.scored for row in parts)
        if logits is None and small and not scored and wanted <= len(self._scorer.logits):
            logits = self._scorer.logits
        chosen = wanted
        if small and wanted and logits is not None and padded_tokens(wanted) <= len(logits):
            chosen = padded_tokens(wanted)
        inputs = self._inputs(parts, n, total - n, chosen)
        staged = self._backend.stagings.of(total) is not None
        alike = small and inputs.attention.is_plain and not (staged or scored)
        if alike and launches is not None and logits is not None:
            found, hidden = self._graphs.run(
                (launches, total, chosen), inputs, lambda own: self._launch(own, rows, logits)
            )
        else:
            found, hidden = self._launch(inputs, rows, logits)
            self._writer.end()
        return found[:wanted], hidden[n : n + tokens]

    def padded(self, tokens: int) -> int:
        """Tokens that a pass of `tokens` computes, idle ones included."""
        found = padded_tokens(tokens)
        return found if found <= self._backend.rows else tokens

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest pass, those of rows included."""
        return self._backend.rows

    def stages_experts(self, tokens: int) -> bool:
        """Whether a pass of `tokens` tokens reads copies of experts."""
        return self._backend.stagings.has_experts(self.padded(tokens))

    def scores(self, step: Step, hidden: torch.Tensor) -> Scores:
        """Start to compute the log-probabilities of a step's `scored` tokens, from `logits`."""
        model, run = self._backend.model, self._scorer

        def logits_of(x: torch.Tensor) -> torch.Tensor:
            run.begin(len(x))
            return model.logits(run, x)

        return Scores(step, hidden, logits_of, len(run.logits))

    @property
    def _scorer(self) -> KernelBackend:
        """Computes logits alone, into a buffer that is idle at a pass's end."""
        self._scoring = self._scoring or self._backend.for_logits()
        return self._scoring

    def _inputs(self, parts: Sequence[Row], n: int, tokens: int, chosen: int) -> PassInputs:
        """Inputs of a pass of `parts`, behind n rows: `tokens` tokens, and `chosen` ones in all."""
        device = self._backend.like.device
        ids = [token for row in parts for token in row.tokens]
        positions = torch.full((tokens,), IDLE, dtype=torch.int32)
        spans = [torch.arange(row.start, row.start + row.length) for row in parts]
        positions[: len(ids)] = torch.cat(spans)
        ends = accumulate((row.length for row in parts), initial=n - 1)
        wanted = [end for row, end in zip(parts, islice(ends, 1, None), strict=True) if row.wanted]
        numbers = [*range(n), *wanted]
        written = self._writer.begin(parts)
        addresses = self._writer.addresses(parts, written)
        idle, int32 = tokens - len(ids), partial(torch.tensor, dtype=torch.int32)
        return PassInputs(
            upload(int32(ids + [0] * idle), device),
            upload(positions, device),
            upload(F.pad(addresses, (0, 0, 0, idle)), device),
            upload(int32(numbers + [0] * (chosen - len(numbers))), device),
            PromptAttention(self._backend.model.config, self._cache, self._shape, parts, written),
        )

    def _launch(
        self, inputs: PassInputs, rows: StepRows | None, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the chosen tokens, and the last layer's output after all, `rows` first."""
        n, backend, ids, positions = 0, self._backend, inputs.ids, inputs.positions
        if rows:
            n = len(rows.ids)
            ids, positions = torch.cat((rows.ids, ids)), torch.cat((rows.positions, positions))
        heads = self._heads[: len(ids)]
        attend: Attend = partial(self._attend, inputs, heads[n:])
        if rows:
            attend = _both(n, rows.attend(heads[:n]), attend, heads)
        backend.begin(len(ids), logits)
        hidden = backend.model.hidden(backend, attend, ids, positions)
        chosen = hidden.index_select(0, inputs.chosen)
        return backend.model.logits(backend, chosen), hidden

    def _attend(
        self, inputs: PassInputs, heads: torch.Tensor, attention: Attention, qkv: torch.Tensor
    ) -> torch.Tensor:
        """`heads` [T, Hq * D] of a fused projection [T, (Hq + 2 Hkv) * D]; stores keys and values.

        Rotates queries and keys in it.
        """
        layer = attention.layer
        self._backend.normalize_heads(attention, qkv)
        joined = qkv.view(len(qkv), -1, attention.head_dim)
        rotations = self._backend.rotations
        self._writer.store(layer, joined, inputs.positions, inputs.kv_addresses, rotations)
        inputs.attention(layer, joined[:, : attention.heads], heads)
        return heads


def _both(n: int, rows: Attend, prompts: Attend, heads: torch.Tensor) -> Attend:
    """Attention of n decode `rows`, then of `prompts`; both write their part of `heads`."""

    def attend(attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        rows(attention, qkv[:n])
        prompts(attention, qkv[n:])
        return heads

    return attend
