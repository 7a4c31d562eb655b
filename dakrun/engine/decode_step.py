"""What a decode step launches, from the rows' newest tokens to their next ones.

Knows rows, their buffers on the device and the kernels' order; neither graphs nor requests.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dakrun.engine.buckets import Bucket
from dakrun.engine.packed_cache import PackedKVCache
from dakrun.kernels.attention.config import AttentionConfig, attention_config
from dakrun.kernels.attention.splitk import Workspace, splitk_flash_attn
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.kernels.runtime.jit import sm_count
from dakrun.kernels.select_greedy import select_greedy
from dakrun.models.kernel_decoder import Activations, KernelDecoder, Operands

LOG_STEPS = 8  # tokens of a slot that are kept for the CPU, more than steps run ahead
IDLE = -1  # the length of a row without a request


class DecodeStep:
    """The rows of a batch of `cache`, those of a bucket being the first ones, tier after tier.

    On the device, one for each row: `tokens` and `slots` (int32), `lengths`, the positions that are
    cached (int32), `caches`, where its slot begins in each layer (int64 [layers, rows]), and after
    a step `logits` [rows, V]. `log` is int32 [slots, LOG_STEPS] in page-locked memory: a step puts
    the token at position p of a slot at p % LOG_STEPS.
    """

    def __init__(
        self, decoder: KernelDecoder, cache: PackedKVCache, accesses: Sequence[TierAccess]
    ) -> None:
        """All rows are idle; `accesses` says how attention reads the tiers."""
        self.decoder, self._cache, self._accesses = decoder, cache, tuple(accesses)
        batch, like = cache.slots, decoder.like
        self.tokens, self.slots = torch.zeros(2, batch, dtype=torch.int32, device=like.device)
        self.lengths = torch.full_like(self.tokens, IDLE)
        self.caches = cache.addresses.clone()
        self.logits = like.new_empty(batch, decoder.config.vocab_size)
        self.log = torch.zeros(batch, LOG_STEPS, dtype=torch.int32, pin_memory=like.is_cuda)
        self._activations = Activations.empty(decoder.config, batch, like)
        self._attention: dict[Bucket, tuple[AttentionConfig, Workspace]] = {}

    def prepare(self, bucket: Bucket) -> None:
        """Take what memory a step of `bucket` needs for itself."""
        cache, model, device = self._cache, self.decoder.config, self.decoder.like.device
        config = attention_config(
            cache.shape, bucket, self._accesses, sms=sm_count(device), capacity=cache.slots,
            alone=self.decoder.fills_sms(sum(bucket)),
        )  # fmt: skip
        workspace = Workspace.empty(config, model.num_heads // model.num_kv_heads, device)
        self._attention[bucket] = config, workspace

    def ops(self, bucket: Bucket, operands: Operands) -> Iterator[tuple[str, Callable[[], object]]]:
        """The launches of a step of a prepared bucket, under the names of the plan's ops."""
        n, decoder = sum(bucket), self.decoder
        tokens, slots, lengths = (x[:n] for x in (self.tokens, self.slots, self.lengths))
        a, logits = self._activations.first(n), self.logits[:n]
        config, workspace = self._attention[bucket]

        def attend(layer: int, qkv: torch.Tensor, heads: torch.Tensor) -> None:
            q, k, v = decoder.heads(qkv)
            splitk_flash_attn(
                q, k, v, self.caches[layer, :n], lengths, config, workspace, heads,
                scale=decoder.scale, rotations=decoder.rotations, pdl=True,
            )  # fmt: skip

        yield "embedding", partial(decoder.embed, tokens, lengths, a.x)
        yield from decoder.ops(operands, a, attend)
        yield "lm_head", partial(decoder.logits, operands, a.x, logits)
        select = partial(select_greedy, logits, tokens, lengths, slots, self.log, pdl=True)
        yield "sampling", select
