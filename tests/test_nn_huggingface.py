"""SplitKCache in models of transformers: their own tokens and logits, or a clear refusal.

On a CPU in plain torch; on a GPU also in CUDA graphs.
"""

import copy
import doctest
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases
from tiny_tokenizer import make_tokenizer_files
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)

from dakrun.hardware import LOCAL
from dakrun.launches import TierAccess
from dakrun.nn import huggingface
from dakrun.nn.huggingface import SplitKCache

VOCAB = 331
ACCESS = TierAccess(sms=8, window_bytes=256 * 1024)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 160,
    "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LLAMA = {
    **COMMON, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "initializer_range": 0.08,
}  # fmt: skip
BATCH, PROMPT, STEPS = 4, 60, 12  # over the end of a block
PADS, NO_PADS = (0, 7, 0, 59), (0,) * BATCH


def llama(kv_heads: int = 2) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=kv_heads, **LLAMA))


def opt() -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=192, num_attention_heads=3, ffn_dim=256, init_std=0.08, **COMMON
        )
    )  # fmt: skip


def of(config: PreTrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config)


MODELS = {
    "opt": opt, "llama-1": lambda: llama(4), "llama-2": lambda: llama(2),
    "llama-4": lambda: llama(1),
    "mistral": lambda: of(MistralConfig(num_key_value_heads=2, head_dim=96, sliding_window=None,
                                        **LLAMA)),
    "qwen2": lambda: of(Qwen2Config(num_key_value_heads=2, **LLAMA)),
    "qwen3": lambda: of(Qwen3Config(num_key_value_heads=2, head_dim=128, **LLAMA)),
    "phi3": lambda: of(Phi3Config(num_key_value_heads=2, sliding_window=None, **LLAMA)),
}  # fmt: skip


def make(build: Callable[[], PreTrainedModel], device: str = "cpu") -> PreTrainedModel:
    torch.manual_seed(0)
    model = build().half().eval().to(device)
    model.set_attn_implementation("dakrun")
    return model


def prompts(device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, VOCAB, (BATCH, PROMPT), generator=generator).to(device)


def masked(pads: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    mask = torch.ones(BATCH, PROMPT, dtype=torch.int64, device=device)
    for row, count in zip(mask, pads, strict=True):
        row[:count] = 0
    return mask


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def twin(model: PreTrainedModel, implementation: str = "sdpa") -> PreTrainedModel:
    other = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    return other


@torch.inference_mode()
def assert_greedy(
    model: PreTrainedModel, tokens: torch.Tensor, pads: Sequence[int], prompt: int = PROMPT
) -> None:
    """Each new token is the likeliest of the float64 model after those before it, or all but so."""
    exact = twin(model).double()
    for row, count in zip(tokens, pads, strict=True):
        logits = exact(row[None, count:-1]).logits[0, prompt - count - 1 :]
        missed = logits.max(-1).values - logits.gather(1, row[prompt:, None])[:, 0]
        assert missed.max() <= 0.02 * logits.std(), row


@pytest.mark.parametrize(
    ("name", "pads"),
    cases(
        itertools.product(MODELS, (PADS, NO_PADS)),
        lambda name, pads: pads == PADS or name == "opt",
    ),
)
def test_generate(name: str, pads: tuple[int, ...]) -> None:
    model, mask = make(MODELS[name]), masked(pads)
    options = {"max_new_tokens": STEPS, "do_sample": False}
    wanted = twin(model).generate(prompts(), attention_mask=mask, **options)
    found = []
    for ratio in (0, 0.5, 1):
        with SplitKCache(model, batch=BATCH, max_cache_len=80, ratio=ratio) as cache:
            for _ in range(2 if ratio == 0.5 else 1):
                cache.reset()
                found.append(
                    model.generate(prompts(), attention_mask=mask, past_key_values=cache, **options)
                )
                seen = PROMPT + STEPS - 1
                assert int(cache.get_seq_length()) == seen
                assert cache.kv.lengths.tolist() == [seen - count for count in pads]
            config = model.config
            heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
            dim = getattr(config, "head_dim", None) or 64
            slot = 2 * heads * 2 * 2 * 64 * dim * 2  # layers, heads, blocks, K and V of 64 x dim
            sizes = {LOCAL: (1 - ratio) * BATCH * slot, "host": ratio * BATCH * slot}
            assert cache.kv.tier_bytes == sizes
    assert all(torch.equal(tokens, found[0]) for tokens in found)
    assert_greedy(model, found[0], pads)
    assert_greedy(model, wanted, pads)
    assert (found[0] == wanted).float().mean() > 0.8


def logits_of_steps(
    model: PreTrainedModel, cache: Any, tokens: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Of a prefill and steps over all tokens, the mask growing: [B, STEPS + 1, vocabulary]."""
    found, first = [], 0
    for last in (PROMPT, *range(PROMPT + 1, PROMPT + STEPS + 1)):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, last - mask.shape[1]), value=1)
        ids = tokens[:, first:last]
        found.append(model(ids, past_key_values=cache, attention_mask=mask).logits[:, -1])
        first = last
    return torch.stack(found, 1)


@torch.inference_mode()
@pytest.mark.parametrize("pads", [None, PADS])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_as_exact_as_those_of_sdpa(name: str, pads: tuple[int, ...] | None) -> None:
    model, mask = make(MODELS[name]), None if pads is None else masked(pads)
    generator = torch.Generator().manual_seed(2)
    more = torch.randint(4, VOCAB, (BATCH, STEPS), generator=generator)
    tokens = torch.cat((prompts(), more), 1)
    plain = twin(model)
    exact = logits_of_steps(twin(model).double(), DynamicCache(), tokens, mask)
    cache = SplitKCache(model, batch=BATCH, max_cache_len=80, ratio=0.5)
    found = logits_of_steps(model, cache, tokens, mask)
    wanted = logits_of_steps(plain, DynamicCache(), tokens, mask)
    for step in range(STEPS + 1):
        allowed = 1.5 * error(wanted[:, step], exact[:, step])
        assert error(found[:, step], exact[:, step]) <= allowed, step


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=message)


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_attention_functions_are_not_fooled(name: str, implementation: str) -> None:
    model = make(MODELS[name])
    cache = SplitKCache(model, batch=BATCH, max_cache_len=80)
    plain = twin(model, implementation)
    with refused(re.escape('set_attn_implementation("dakrun")')):
        plain(prompts(), past_key_values=cache)


@torch.inference_mode()
def test_other_caches_are_refused() -> None:
    model = make(llama)
    for cache in (None, DynamicCache(), StaticCache(model.config, max_cache_len=80)):
        with refused("needs a SplitKCache"):
            model(prompts(), past_key_values=cache)


@torch.inference_mode()
def test_masks_that_are_refused() -> None:
    model, ids = make(llama), prompts()
    cache = SplitKCache(model, batch=BATCH, max_cache_len=80)
    right, holes, nothing = masked(PADS).flip(1), masked(PADS), masked((0, 0, 0, PROMPT))
    holes[0, 5] = 0
    for mask in (right, holes, nothing):
        cache.reset()
        with refused("padding on the left only"):
            model(ids, attention_mask=mask, past_key_values=cache)
    causal = torch.ones(BATCH, 1, PROMPT, PROMPT, dtype=torch.bool).tril()
    with refused(r"mask \[4, tokens\], got \[4, 1, 60, 60\]"):
        model(ids, attention_mask=causal, past_key_values=cache)
    cache.reset()
    with refused(r"60 tokens, got \[4, 80\]"):
        longer = torch.nn.functional.pad(masked(PADS), (0, 20), value=1)
        model(ids, attention_mask=longer, past_key_values=cache)
    cache.reset()
    model(ids, attention_mask=masked(PADS), past_key_values=cache)
    with refused("padding of the prefill"):
        model(ids[:, :1], attention_mask=torch.ones(BATCH, 61), past_key_values=cache)


@torch.inference_mode()
def test_what_else_is_refused() -> None:
    model, ids = make(llama), prompts()
    cache = SplitKCache(model, batch=BATCH, max_cache_len=62)
    with refused("no dropout, output_attentions or sliding_window"):
        model(ids, past_key_values=cache, output_attentions=True)
    cache.reset()
    with refused(r"expected query as \[4, Hq, L, 64\]"):
        model(ids[:2], past_key_values=cache)
    cache.reset()
    model(ids, past_key_values=cache)
    with refused("room for 60 tokens in every slot of 62"):
        model(ids, past_key_values=cache)
    cache.reset()
    with refused("room in every slot, but 62 "):
        model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    cache.reset()
    options = {"max_new_tokens": 2, "do_sample": False}
    with refused("cannot be reordered"):
        model.generate(ids[:2], past_key_values=cache, num_beams=2, **options)
    for change in (cache.crop, cache.batch_repeat_interleave, cache.batch_select_indices):
        with refused("cannot be reordered"):
            change(1)
    with refused(r"models in float16 or bfloat16, got torch\.float32: load it with .*dtype="):
        SplitKCache(model.float(), batch=BATCH, max_cache_len=62)
    cache.close()
    with refused("closed"):
        model.half()(ids, past_key_values=cache)


@torch.inference_mode()
def test_sliding_windows_and_dropout_are_refused() -> None:
    config = MistralConfig(sliding_window=16, num_key_value_heads=2, **LLAMA)
    sliding = make(lambda: MistralForCausalLM(config))
    cache = SplitKCache(sliding, batch=BATCH, max_cache_len=80)
    with refused("causal"):
        sliding(prompts(), past_key_values=cache)
    cache.reset()
    with refused("no dropout, output_attentions or sliding_window"):  # one token: no mask
        sliding.model.layers[0].self_attn.config._attn_implementation = "dakrun"
        attention = sliding.model.layers[0].self_attn
        turns = sliding.model.rotary_emb(torch.zeros(BATCH, 1, 256).half(), torch.zeros(1, 1))
        attention(torch.zeros(BATCH, 1, 256).half(), turns, None, past_key_values=cache)
    config = LlamaConfig(attention_dropout=0.1, **LLAMA)
    learning = make(lambda: LlamaForCausalLM(config)).train()
    cache = SplitKCache(learning, batch=BATCH, max_cache_len=80)
    with refused("no dropout"):
        learning(prompts(), past_key_values=cache)


def decode(
    model: PreTrainedModel, cache: Any, mask: torch.Tensor | None, *, captured: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, PROMPT + STEPS + 1] and logits of the steps, each a replay where `captured`."""
    logits = model(prompts("cuda"), past_key_values=cache, attention_mask=mask).logits[:, -1]
    token = logits.argmax(-1, keepdim=True)
    tokens, found = [prompts("cuda"), token.clone()], []

    def advance() -> torch.Tensor:
        logits = model(token, past_key_values=cache).logits[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    step: Callable[[], Any] = advance
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = advance()
        step = graph.replay
    for _ in range(STEPS):
        result = step()
        found.append((logits if captured else result).clone())
        tokens.append(token.clone())
    return torch.cat(tokens, 1), torch.stack(found, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("pads", [None, PADS])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@torch.inference_mode()
def test_a_captured_step(kv_heads: int, pads: tuple[int, ...] | None) -> None:
    model = make(lambda: llama(kv_heads), "cuda")
    mask = None if pads is None else masked(pads, "cuda")
    runs: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}
    for ratio in (0, 0.5, 1):
        options: dict[str, Any] = {"batch": BATCH, "max_cache_len": 80, "ratio": ratio}
        with SplitKCache(model, access=ACCESS, **options) as cache:
            for captured, found in runs.items():  # eager first, since it compiles the kernel
                cache.reset()
                found.append(decode(model, cache, mask, captured=captured))
                assert cache.kv.lengths.tolist() == [
                    PROMPT + STEPS - count for count in pads or [0] * BATCH
                ]
    for found in runs.values():
        assert all(torch.equal(logits, found[0][1]) for _, logits in found), "ratios"
    (tokens, logits), (eager_tokens, _) = runs[True][0], runs[False][0]
    assert torch.equal(tokens, eager_tokens)
    if pads is not None:  # without a mask, which a graph does not need, sdpa would see the pads
        return
    assert_greedy(model, tokens, (0,) * BATCH)
    exact, plain = (
        logits_of_steps(other, StaticCache(model.config, max_cache_len=80), tokens[:, :-1], None)
        for other in (twin(model).double(), twin(model))
    )
    for step in range(STEPS):
        allowed = 2 * error(plain[:, step + 1], exact[:, step + 1])
        assert error(logits[:, step], exact[:, step + 1]) <= allowed, step


@pytest.mark.gpu
def test_generate_on_a_gpu() -> None:
    model, mask = make(llama, "cuda"), masked(PADS, "cuda")
    options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False}
    with SplitKCache(model, batch=BATCH, max_cache_len=80, ratio=0.5, access=ACCESS) as cache:
        found = model.generate(
            prompts("cuda"), attention_mask=mask, past_key_values=cache, **options
        )
    assert_greedy(model, found, PADS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    example = doctest.script_from_examples(huggingface.__doc__)
    (name,) = set(re.findall(r'from_pretrained\("(.*?)"', example))
    folder = make_tokenizer_files(tmp_path / name)
    make(llama).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example.replace('"cuda"', f'"{device}"'), "dakrun.nn.huggingface", "exec"), names)
    prompts, tokens = names["prompts"], names["tokens"]
    assert names["cache"].kv.slots == (1, 1)
    length = prompts.input_ids.shape[1]
    assert tokens.shape == (2, length + 32)
    pads = (prompts.attention_mask == 0).sum(1).tolist()
    assert any(pads)
    assert_greedy(names["model"], tokens, pads, length)
