"""Models whose layers differ: planner, loader and runner walk whatever modules there are."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from planned import known
from safetensors.torch import load_file, save_file

from dakrun import LLM, SamplingParams
from dakrun.config import ModelConfig
from dakrun.models import (
    Backend,
    Decoder,
    Linear,
    Module,
    Norm,
    Operand,
    Scope,
    Source,
    families,
    known_model,
)
from dakrun.models.decoder import passes_on_norm
from dakrun.models.experts import Experts
from dakrun.models.hub import in_format
from dakrun.models.llama import gated, llama
from dakrun.models.operands import HeadOrder
from dakrun.plan import Policy

NAME = "llama-gqa3-tied"
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


class Halves:
    """A gated feed-forward in two halves, each with matrices and ops of its own."""

    def __init__(self, c: ModelConfig, at: Scope) -> None:
        norm = Norm("rms", at, "ffn_norm", "post_attention_layernorm", c.hidden_size)
        half, hidden = c.ffn_size // 2, c.hidden_size
        self.ups, self.downs = [], []
        for i in "ab":
            up = {f"mlp.{i}.gate_proj": half, f"mlp.{i}.up_proj": half}
            one = Linear(at, f"up_{i}", up, hidden, norm=norm, activation="silu_mul")
            self.ups.append(one)
            down = {f"mlp.{i}.down_proj": hidden}
            self.downs.append(Linear(at, f"down_{i}", down, half, adds=True))

    def __call__(self, x: torch.Tensor, run: Backend) -> torch.Tensor:
        inner = [run.linear(up, x) for up in self.ups]
        for down, of in zip(self.downs, inner, strict=True):
            x = run.linear(down, of, x)
        return x

    def modules(self) -> Iterator[Module]:
        yield from (*self.ups, *self.downs)


def varied(c: ModelConfig) -> Decoder:
    """Layer 0 with a feed-forward in halves, layer 1 without one, layer 2 as Llama has it."""
    model = llama(c)
    model.layers[0].feed_forward = Halves(c, Scope("model.layers.0.", 0))
    model.layers[1].feed_forward = None
    return model


def generated(path: Path) -> tuple[LLM, list[list[int]], list[float]]:
    policy = Policy(offload_ratio=0.4, kv_offload_ratio=0.0)
    llm = LLM(path, device="cpu", batch_size=2, policy=policy)
    params = SamplingParams(max_tokens=8, logprobs=1)
    found = llm.generate(PROMPTS, params)
    values = [step[0].logprob for one in found for step in one.logprobs or ()]
    return llm, [one.token_ids for one in found], values


@pytest.fixture
def unmemoized() -> Iterator[None]:
    families.decoder_of.cache_clear()
    yield
    families.decoder_of.cache_clear()


@pytest.mark.usefixtures("unmemoized")
def test_layers_of_a_model_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same function as that of Llama with the same weights, in other matrices."""
    path = tiny_models.save(NAME, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    save_file(tensors, path / "model.safetensors")
    _, tokens, logprobs = generated(path)
    of_layer_1 = [f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    for name in (*of_layer_1, "post_attention_layernorm.weight"):
        del tensors[f"model.layers.1.{name}"]
    for kind in ("gate", "up", "down"):
        whole = tensors.pop(f"model.layers.0.mlp.{kind}_proj.weight")
        for i, half in zip("ab", whole.chunk(2, dim=int(kind == "down")), strict=True):
            tensors[f"model.layers.0.mlp.{i}.{kind}_proj.weight"] = half.contiguous()
    save_file(tensors, path / "model.safetensors")
    monkeypatch.setitem(families.FAMILIES, "llama", varied)
    families.decoder_of.cache_clear()
    llm, found, values = generated(path)
    assert found == tokens
    assert values == pytest.approx(logprobs, abs=1e-4)
    layers = {op.op.name: op.op.layers for op in llm.plan.ops}
    once = ("gate_up", "down", "up_a", "up_b", "down_a", "down_b", "lm_head")
    assert layers == {"qkv": 3, "attention": 3, "o": 3} | dict.fromkeys(once, 1)
    tiers = {part.tier for part in llm.engine.runner.weights.matrices["layers.2.down"].parts}
    assert tiers == {"hbm", "host"}
    assert {*layers} - {"attention"} <= {*llm.engine.runner.op_seconds(8)}


def test_matrices_of_an_op_have_one_shape() -> None:
    config = known_model("llama-3.2-1b")
    assert config is not None
    model, other = llama(config), replace(config, ffn_size=64)
    model.layers[3].feed_forward = gated(other, Scope("model.layers.3.", 3))
    message = (
        r"all gate_up, got \(16384, 2048\) in layers\.0\.gate_up and \(128, 2048\) in layers\.3"
    )
    with pytest.raises(ValueError, match=message):
        Decoder(config, model.embedding, model.layers, model.head)


def test_rows_of_gates_alternate_with_those_behind_them() -> None:
    """As kernels have them: each two tensors of a matrix, or the halves of a single one."""
    a, b, c, d = (Source(name, (16, 4)) for name in "abcd")
    stacked = Operand("stacked", (a, b, c, d), interleaved=True)
    assert stacked.shape == (64, 4)
    assert stacked.request(slice(8, 56), for_kernels=True) == [
        (a, slice(4, 16)),
        (b, slice(4, 16)),
        (c, slice(0, 12)),
        (d, slice(0, 12)),
    ]
    assert stacked.request(slice(8, 40), for_kernels=False) == [
        (a, slice(8, 16)),
        (b, slice(0, 16)),
        (c, slice(0, 8)),
    ]
    halves = Operand("halves", (a,), interleaved=True)
    assert halves.request(slice(8, 16), for_kernels=True) == [(a, slice(4, 8)), (a, slice(12, 16))]


@pytest.mark.parametrize(("size", "rotated", "rows"), [(8, 4, 24), (80, 40, 160), (64, 16, 128)])
def test_rows_that_rope_rotates_together_are_half_a_head_apart(
    size: int, rotated: int, rows: int
) -> None:
    """In the order for kernels, of any range of row blocks; rows behind the heads stay."""
    order = HeadOrder(rows, size, rotated)
    found = [row for run in order.runs(slice(0, rows + 8)) for row in range(run.start, run.stop)]
    assert sorted(found) == list(range(rows + 8)) and found[rows:] == [*range(rows, rows + 8)]
    for head in range(0, rows, size):
        for i in range(rotated // 2):
            assert found[head + i] == head + i
            assert found[head + i + size // 2] == head + i + rotated // 2
    for start in range(0, rows, 8):
        some = order.runs(slice(start, start + 16))
        got = [row for run in some for row in range(run.start, run.stop)]
        assert got == [*found, *range(rows + 8, rows + 16)][start : start + 16]


@pytest.mark.parametrize(
    ("name", "format", "wanted"),
    [
        ("llama-3-8b", "awq", {("o", "gate_up"), ("down", "qkv")}),
        ("llama-3-8b", "auto", set()),  # matrices take norms in
        ("opt-6.7b", "fp8", set()),  # LayerNorms
        ("qwen3-30b-a3b", "awq", set()),
        (
            "glm-4.5-air", "fp8",
            {("o", "gate_up"), ("o", "shared_gate_up"), ("shared_down", "qkv"), ("down", "qkv")},
        ),
    ],
)  # fmt: skip
def test_norms_that_are_a_part_of_products(
    name: str, format: str, wanted: set[tuple[str, str]]
) -> None:
    model = families.decoder_of(in_format(known(name), format))
    order = [one for one in model.modules() if isinstance(one, Linear | Experts)]
    pairs = [pair for pair in itertools.pairwise(order) if passes_on_norm(*pair)]
    assert {(one.op, two.op) for one, two in pairs} == wanted
    if name == "llama-3-8b" and wanted:  # all but the first layer's, and the lm_head's
        assert len(pairs) == 2 * model.config.num_layers - 1
        _, (o, gate_up), *_ = itertools.pairwise(order)
        o.format = model.config.weight_format
        assert not passes_on_norm(o, gate_up), "in 16 bits it writes no scaled rows"
