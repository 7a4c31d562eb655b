"""SplitKFlashAttn in models of transformers: the attention implementation "dakrun" and its cache.

Importing this registers the implementation; `model.set_attn_implementation("dakrun")` chooses it.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from dakrun.hardware import HardwareProfile
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.memory.tiers import HOST
from dakrun.nn.attention import SplitKFlashAttn
from dakrun.nn.kv_cache import PartitionedKVCache, require

ATTENTION = "dakrun"
# Arguments of transformers' attention functions that change the result, where they are not None.
UNSUPPORTED = (
    "sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q",
)  # fmt: skip


class SplitKCache(Cache):
    """The cache of a model whose attention implementation is "dakrun"; for `past_key_values`.

    It has `kv`, the PartitionedKVCache of all layers, and keeps keys and values there alone. Like a
    StaticCache it has room for `max_cache_len` tokens a request, pads included, and CUDA graphs
    that capture a step of one token stay valid until `close`, or the end of a `with` block, gives
    the memory back. `reset` empties it for the next requests.

    The model's attention has to be causal over all that was before, in float16 or bfloat16 with
    heads of 64, 80, 96 or 128, as that of OPT and Llama is. `batch` requests start together with
    one prefill. An attention mask may be left out or [batch, tokens so far]; it may pad prompts on
    their left, and pads are not kept. Beams, cropping and a second prefill are not supported.
    All that is not supported raises ValueError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        batch: int,
        max_cache_len: int,
        ratio: float = 0.1,
        remote: str = HOST,
        profile: HardwareProfile | str | None = None,
        access: TierAccess | None = None,
    ) -> None:
        """Take memory for a model where it is; the rest, and what is raised, as PartitionedKVCache.

        The last requests, `ratio` of the batch, lie in the tier `remote`.
        """
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        self.kv = PartitionedKVCache(
            batch,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            max_cache_len,
            layers=config.num_hidden_layers,
            ratio=ratio,
            remote=remote,
            profile=profile,
            access=access,
            dtype=model.dtype,
            device=model.device,
        )
        self.attention = SplitKFlashAttn()
        # What a StaticCache counts: tokens of the batch, pads included.
        self.seen = torch.zeros((), dtype=torch.int64, device=self.kv.device)
        super().__init__(layers=[_Layer(self, i) for i in range(self.kv.layers)])

    def reset(self) -> None:
        """Empty the cache, in place, so that graphs stay valid."""
        self.kv.reset()
        self.seen.zero_()

    def close(self) -> None:
        """Give the memory back. Repeating it does nothing."""
        self.kv.close()

    def __enter__(self) -> "SplitKCache":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Layer(CacheLayerMixin):
    """What transformers asks of one layer of a SplitKCache."""

    def __init__(self, cache: SplitKCache, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number
        self.batch_size, self.is_initialized = cache.kv.batch, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the memory was taken at once."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple["_New", "_New"]:
        """What the model is to hand to `attend` as keys and values."""
        if self.number == 0:
            self.cache.seen += key_states.shape[2]
        new = _New(self, key_states, value_states)
        return new, new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> torch.Tensor:
        """Tokens of each request, pads included: int64 [] on the device, as graphs need it."""
        return self.cache.seen

    def get_max_length(self) -> int:
        return self.cache.kv.shape.positions

    def reset(self) -> None:
        self.cache.reset()

    def _refuse(self, *args: Any) -> NoReturn:
        raise ValueError("a SplitKCache is not reordered, cropped, repeated or moved")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse


@dataclass
class _New:
    """New keys and values [B, Hkv, L, D] on their way from a cache's `update` to `attend`.

    No tensor, so that another attention function does not take them for all keys and values.
    """

    layer: _Layer
    keys: torch.Tensor
    values: torch.Tensor

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(
            f'a SplitKCache needs model.set_attn_implementation("{ATTENTION}"); another attention '
            f"function, or this model itself, asked its keys for {name}"
        )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: _New | torch.Tensor,
    value: _New | torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function "dakrun" of transformers: out [B, L, Hq, D], and no weights.

    query is [B, Hq, L, D], key and value are what the update of a SplitKCache returned, and
    attention_mask is what `padding_mask` made. Raises ValueError for all other.
    """
    if not isinstance(key, _New) or key is not value:
        raise ValueError(f'attention "{ATTENTION}" needs a SplitKCache as past_key_values')
    used = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or used or not causal or kwargs.get("output_attentions"):
        raise ValueError(
            f'attention "{ATTENTION}" is causal, without dropout, weights returned or '
            f"{', '.join(UNSUPPORTED)}"
        )
    layer, padding = key.layer, None
    if attention_mask is not None:
        padding = _padding(layer, query.shape[2], attention_mask)
    out = layer.cache.attention(
        query, key.keys, key.values, layer.cache.kv,
        layer=layer.number, padding=padding, scale=scaling,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def padding_mask(
    batch_size: int,
    q_length: int,
    *args: Any,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask function "dakrun" of transformers: the mask that the user gave, bool [B, tokens].

    None stays None. Raises ValueError where it pads elsewhere than on the left, or where the model
    asks for another mask than the causal one.
    """
    if mask_function is not causal_mask_function:
        raise ValueError(f'attention "{ATTENTION}" is causal over all that was before')
    if attention_mask is not None:
        in_order = (attention_mask[:, 1:] >= attention_mask[:, :-1]).all()
        require(
            in_order & attention_mask[:, -1].all(),
            "expected an attention mask that pads on the left alone",
        )
    return attention_mask


def _padding(layer: _Layer, count: int, mask: torch.Tensor) -> list[int] | None:
    """What of a prefill of `count` tokens are pads; nothing to say of one token."""
    kv = layer.cache.kv
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != kv.batch:
        raise ValueError(
            f"expected an attention mask [{kv.batch}, tokens], got {list(mask.shape)}, {mask.dtype}"
        )
    if count > 1:
        if mask.shape[1] != count:
            raise ValueError(f"expected a mask of {count} tokens, got {list(mask.shape)}")
        return (~mask).sum(1).tolist()
    if layer.number == 0:  # the others see the same
        require(
            (mask.sum(1) == kv.lengths + 1).all(),
            "expected an attention mask with the pads of the prefill",
        )
    return None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, padding_mask)
