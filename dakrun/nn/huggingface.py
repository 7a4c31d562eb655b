"""SplitKFlashAttn in models of transformers: the attention implementation "dakrun" and its cache.

Importing this module registers the implementation. Left padding is not stored; prefills use torch's
attention.

>>> import torch
>>> from transformers import AutoModelForCausalLM, AutoTokenizer
>>> from dakrun.nn.huggingface import SplitKCache
>>> tokenizer = AutoTokenizer.from_pretrained("path/to/model", padding_side="left")
>>> tokenizer.pad_token = tokenizer.eos_token
>>> model = AutoModelForCausalLM.from_pretrained("path/to/model", dtype=torch.float16).to("cuda")
>>> model.set_attn_implementation("dakrun")
>>> texts = ["Once upon a time", "The sea"]
>>> prompts = tokenizer(texts, padding=True, return_tensors="pt").to("cuda")
>>> with SplitKCache(model, batch=2, max_cache_len=128, ratio=0.5) as cache:  # one slot is remote
...     tokens = model.generate(**prompts, past_key_values=cache, max_new_tokens=32)
>>> print(tokenizer.batch_decode(tokens, skip_special_tokens=True))

A CUDA graph can capture a step of one token, as in the example of dakrun.nn: the kernel reads the
requests' lengths on the device.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from dakrun.hardware import HardwareProfile
from dakrun.kernels.attention.kv_blocks import DTYPES
from dakrun.launches import TierAccess
from dakrun.memory.tiers import HOST
from dakrun.nn.attention import SplitKFlashAttn
from dakrun.nn.kv_cache import PartitionedKVCache, require

ATTENTION = "dakrun"
# Arguments of transformers' attention functions that change the result unless they are None.
UNSUPPORTED = (
    "sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q",
)  # fmt: skip


class SplitKCache(Cache):
    """The `past_key_values` of a model whose attention implementation is "dakrun".

    `kv` is the PartitionedKVCache of all layers. Like a StaticCache, this has room for
    `max_cache_len` tokens per request, padding included, and CUDA graphs of a step of one token
    stay valid until `close`, or the end of a `with` block, frees the memory. `reset` empties the
    cache for the next requests.

    The model's attention must be causal over all previous tokens, in float16 or bfloat16 with heads
    of 64, 80, 96 or 128, as in OPT and Llama. All requests start with one common prefill. An
    attention mask is optional; it is [batch, tokens so far] and may pad prompts on the left.
    Sliding windows, beams, cropping, other masks and a second prefill raise ValueError.
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
        """Allocate slots on the model's device; the last `ratio` of them in the tier `remote`.

        Options and errors are those of PartitionedKVCache.
        """
        if model.dtype not in DTYPES:
            raise ValueError(
                f"a SplitKCache takes models in float16 or bfloat16, got {model.dtype}: load it "
                "with from_pretrained(..., dtype=torch.float16), or convert it with model.half()"
            )
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
        # Tokens so far, padding included, as a StaticCache counts them.
        self.seen = torch.zeros((), dtype=torch.int64, device=self.kv.device)
        super().__init__(layers=[_Layer(self, i) for i in range(self.kv.layers)])

    def reset(self) -> None:
        """Empty the cache in place; graphs stay valid."""
        self.kv.reset()
        self.seen.zero_()

    def close(self) -> None:
        """Free the memory. Closing twice does nothing."""
        self.kv.close()

    def __enter__(self) -> "SplitKCache":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Layer(CacheLayerMixin):
    """One layer of a SplitKCache, with the interface that transformers expects."""

    def __init__(self, cache: SplitKCache, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number
        self.batch_size, self.is_initialized = cache.kv.batch, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: SplitKCache has allocated the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple["_New", "_New"]:
        """The new keys and values in the form that `attend` expects."""
        if self.number == 0:
            self.cache.seen += key_states.shape[2]
        new = _New(self, key_states, value_states)
        return new, new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> torch.Tensor:
        """Tokens so far, padding included: int64 [] on the device, for CUDA graphs."""
        return self.cache.seen

    def get_max_length(self) -> int:
        return self.cache.kv.shape.positions

    def reset(self) -> None:
        self.cache.reset()

    def _refuse(self, *args: Any) -> NoReturn:
        raise ValueError("a SplitKCache cannot be reordered, cropped, repeated or moved")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse


@dataclass
class _New:
    """New keys and values [B, Hkv, L, D], passed from a cache's `update` to `attend`.

    Deliberately not a tensor: another attention function would mistake it for all keys and values.
    """

    layer: _Layer
    keys: torch.Tensor
    values: torch.Tensor

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(
            f'a SplitKCache needs model.set_attn_implementation("{ATTENTION}"); another attention '
            f"function, or the model itself, read {name} of its keys"
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

    `query` is [B, Hq, L, D], `key` and `value` come from a SplitKCache's `update`, `attention_mask`
    from `padding_mask`. Raises ValueError for anything else.
    """
    if not isinstance(key, _New) or key is not value:
        raise ValueError(f'attention "{ATTENTION}" needs a SplitKCache as past_key_values')
    used = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or used or not causal or kwargs.get("output_attentions"):
        raise ValueError(
            f'attention "{ATTENTION}" is causal and supports no dropout, output_attentions or '
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
    """The mask function "dakrun" of transformers: the user's mask, bool [B, tokens], or None.

    Raises ValueError if the mask pads anywhere but on the left, or if the model needs a mask that
    is not causal.
    """
    if mask_function is not causal_mask_function:
        raise ValueError(f'attention "{ATTENTION}" is causal over all previous tokens')
    if attention_mask is not None:
        in_order = (attention_mask[:, 1:] >= attention_mask[:, :-1]).all()
        require(
            in_order & attention_mask[:, -1].all(),
            "expected an attention mask with padding on the left only",
        )
    return attention_mask


def _padding(layer: _Layer, count: int, mask: torch.Tensor) -> list[int] | None:
    """Padding of each request in a prefill of `count` tokens; None for one token."""
    kv = layer.cache.kv
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != kv.batch:
        raise ValueError(
            f"expected an attention mask [{kv.batch}, tokens], got {list(mask.shape)}, {mask.dtype}"
        )
    if count > 1:
        if mask.shape[1] != count:
            raise ValueError(f"expected a mask of {count} tokens, got {list(mask.shape)}")
        return (~mask).sum(1).tolist()
    if layer.number == 0:  # the other layers get the same mask
        require(
            (mask.sum(1) == kv.lengths + 1).all(),
            "expected an attention mask with the padding of the prefill",
        )
    return None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, padding_mask)
