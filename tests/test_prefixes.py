"""Requests that share a prefix: its keys and values are computed once, and no token changes."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dakrun.config import SamplingParams
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.kv_layout import RowLayout
from dakrun.engine.prefix_cache import block_names
from dakrun.engine.step import Row, Step
from dakrun.geometry import KV_BLOCK
from dakrun.llm import LLM
from dakrun.memory.tiers import allocate_tiers
from dakrun.plan import Plan, Policy

VOCAB, MAX_LEN = 64, 320


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 channels with random weights, far from ties."""
    folder = tmp_path_factory.mktemp("prefixes")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@contextmanager
def load(path: Path, batch_size: int, parts: list[Row]) -> Iterator[LLM]:
    """An LLM on the CPU, half of whose KV cache is in host memory; `parts` gets all it computes."""
    policy = Policy(offload_ratio=0.3, kv_offload_ratio=0.5 if batch_size > 1 else 0.0)
    with LLM(
        path, device="cpu", batch_size=batch_size, max_model_len=MAX_LEN, policy=policy
    ) as llm:
        launch = llm.engine.runner.launch

        def launched(step: Step) -> None:
            parts.extend(step.prompts)
            launch(step)

        llm.engine.runner.launch = launched  # type: ignore[method-assign]
        yield llm


Tokens = list[tuple[int, ...]]


def run(path: Path, batch_size: int, given: Sequence[Sequence[int]]) -> tuple[Tokens, int, int]:
    """New tokens of each prompt; how many tokens of prompts were computed, and how many shared."""
    parts: list[Row] = []
    with load(path, batch_size, parts) as llm:
        found = llm.generate(given, SamplingParams(max_tokens=6))
        cache = llm.engine.runner.cache
        assert all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))
        assert not any(cache.borrowed(tier) for tier in range(len(cache.blocks)))
        shared = llm.engine.stats.shared_tokens
    computed = sum(len(part.tokens) for part in parts)
    return [c.token_ids for c in found], computed, shared


def prompts() -> list[list[int]]:
    """Groups with prefixes of 0 to 200 tokens, mixed; some prompts are equal, some whole blocks."""
    chance = random.Random(3)

    def draw(count: int) -> list[int]:
        return chance.choices(range(3, VOCAB), k=count)

    prefixes = [draw(count) for count in (0, 63, 64, 65, 130, 200)]
    found = [prefix + draw(chance.randint(1, 70)) for prefix in prefixes for _ in range(8)]
    found += [list(found[-1]), list(found[-1]), prefixes[2], prefixes[2], prefixes[2] * 2]
    chance.shuffle(found)
    return found


def test_names_are_those_of_all_tokens_up_to_the_block_s_end() -> None:
    tokens = list(range(200))
    names = block_names(tokens)
    assert len(names) == 3 == len(set(names))
    assert block_names(tokens[:191]) == names[:2]
    assert block_names(tokens[:63]) == []
    changed = block_names([*tokens[:100], 7, *tokens[101:]])
    assert changed[0] == names[0]
    assert not {changed[1], changed[2]} & set(names)
    assert block_names([*range(64)] * 2)[1] not in names


def test_shared_prefixes_change_no_token(path: Path) -> None:
    """They are computed once in each tier, even where requests begin together."""
    given = prompts()
    alone, everything, _ = run(path, 1, given)
    together, computed, shared = run(path, 12, given)
    assert together == alone
    assert computed + shared == sum(map(len, given))
    # Two tiers compute up to 64, 64, 128 and 192 tokens of the prefixes of eight requests each.
    assert computed < everything
    assert shared >= 6 * (64 + 64 + 128 + 192)


def test_without_sharing_nothing_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompts()
    together, _, _ = run(path, 12, given)
    monkeypatch.setattr(KVCache, "share", lambda *_: 0)
    apart, computed, shared = run(path, 12, given)
    assert shared == 0
    assert computed == sum(map(len, given))
    assert apart == together


def test_with_few_blocks_prefixes_are_evicted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for two or three requests in each tier, of the six that its slots would hold."""
    given = prompts()
    alone, _, _ = run(path, 1, given)
    monkeypatch.setattr(Plan, "kv_placement", lambda _: (("hbm", 6, 7), ("host", 6, 8)))
    few, _, shared = run(path, 12, given)
    assert few == alone
    assert 0 < shared < sum(map(len, given))


def test_equal_prompts_of_one_step_are_computed_once(path: Path) -> None:
    """The second waits a step, then computes what is left of its last block, or a token."""
    one, two = [[5 + i % 50 for i in range(n)] for n in (150, 128)]
    two = [9, *two[1:]]
    for prompt, rest in ((one, 150 - 128), (two, 64)):
        found, computed, _ = run(path, 4, [prompt] * 8)
        assert len(set(found)) == 1
        assert computed == 2 * len(prompt) + 6 * rest, "once in each of two tiers"


def test_tiers_do_not_wait_for_each_other_s_blocks(path: Path) -> None:
    parts: list[Row] = []
    with load(path, 4, parts) as llm:
        prompt = [5 + i % 50 for i in range(150)]
        llm.generate([prompt] * 4, SamplingParams(max_tokens=2))
        first = [part for part in parts if part.start == 0]
        assert len({llm.engine.runner.cache.tier(part.slot) for part in first}) == 2
        assert parts[: len(first)] == first


def cache_of(blocks: int) -> KVCache:
    layout = RowLayout(kv_heads=1, head_dim=8, positions=4 * KV_BLOCK, dtype=torch.float32)
    device = torch.device("cpu")
    return KVCache(
        [("hbm", 4, blocks)], 1, layout, allocate_tiers({"hbm": 1 << 20}, device), device
    )


def test_blocks_are_shared_counted_kept_and_evicted() -> None:
    cache, names = cache_of(6), [b"a", b"b", b"c"]
    assert cache.share(0, names) == 0
    assert cache.reserve(0, 3 * KV_BLOCK)
    cache.publish(0, names[:2])
    assert cache.reserve(1, 4 * KV_BLOCK) is False
    assert cache.reserve(1, 3 * KV_BLOCK)
    assert cache.free(0) == 0
    own = [cache.block(1, number) for number in range(3)]
    assert cache.share(1, names) == 2  # its own blocks are free again
    assert cache.free(0) == 2
    assert cache.borrowed(0) == 2
    for number in range(2):
        assert cache.block(1, number).data_ptr() == cache.block(0, number).data_ptr()
    assert cache.block(1, 2).data_ptr() == own[2].data_ptr()
    cache.release(0)
    assert cache.free(0) == 3  # slot 1 still has two blocks of slot 0
    first = cache.block(1, 0).data_ptr()
    cache.release(1)
    assert (cache.free(0), cache.borrowed(0)) == (6, 0)
    assert cache.share(2, names) == 2  # kept, though no slot had them
    assert cache.block(2, 0).data_ptr() == first
    cache.release(2)
    assert cache.reserve(3, 4 * KV_BLOCK)
    assert cache.reserve(2, KV_BLOCK)  # evicts the last block of the prefix first
    assert cache.share(1, names) == 1
    cache.release_all()
    assert cache.free(0) == 6
    assert cache.share(1, names) == 0, "names end with the run"
