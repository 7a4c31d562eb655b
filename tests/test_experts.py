"""Experts: the router's choice, products over tiers, checkpoints, and what they cost."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from cards import hopper, properties
from click.testing import CliRunner
from quantised import CONFIG, FORMATS, KINDS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from dakrun.cli.main import main
from dakrun.config import ModelConfig, Routing, SamplingParams, Workload
from dakrun.engine.build import tier_accesses, why_plain_torch
from dakrun.errors import CannotRun, UsageError
from dakrun.formats import QuantisedRows, Rows
from dakrun.hardware import load_profile
from dakrun.kernels.experts import reference as experts
from dakrun.llm import LLM
from dakrun.memory.matrix import TieredMatrix
from dakrun.memory.tiers import allocate_tiers
from dakrun.models import decoder_of, known_model, parse_model_config
from dakrun.plan import Policy, decode_ops, make_plan
from dakrun.weights import Checkpoint, Packing, load, loading, tier_capacities

MIXTURES = [name for name, of in tiny_models.CONFIGS.items() if hasattr(of, "num_experts_per_tok")]
FILE = "model.safetensors"
PROMPTS = [[5, 6, 7, 8], [9], list(range(10, 40))]


def routing(**changed: object) -> Routing:
    return Routing(**({"experts": 8, "top_k": 3} | changed))


def test_equal_scores_go_to_the_lowest_indexes() -> None:
    logits = torch.zeros(2, 64)
    logits[1, [40, 7, 50]] = 1.0
    found, weights = experts.choose(logits, None, routing(experts=64, top_k=5))
    assert found.tolist() == [[0, 1, 2, 3, 4], [7, 40, 50, 0, 1]]
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    grouped = routing(experts=64, top_k=9, groups=8, top_groups=2, scores="sigmoid")
    found, _ = experts.choose(torch.zeros(1, 64), torch.zeros(64), grouped)
    assert found.tolist() == [list(range(9))]


def test_weights_are_parts_of_the_softmax_of_all_experts_unless_renormalized() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    _, plain = experts.choose(logits, None, routing(experts=4, top_k=2, renormalized=False))
    torch.testing.assert_close(plain, logits.softmax(-1)[:, [1, 3]])
    _, divided = experts.choose(logits, None, routing(experts=4, top_k=2, scale=3.0))
    torch.testing.assert_close(divided, torch.tensor([[1.5, 1.5]]))


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (6, 5)])
@pytest.mark.parametrize("renormalized", [True, False])
def test_sigmoid_routers_choose_as_transformers_does(
    groups: int, top_groups: int, renormalized: bool
) -> None:
    config = tiny_models.CONFIGS["glm4-moe"].__class__(
        hidden_size=20, num_experts_per_tok=5, n_routed_experts=24, n_group=groups,
        topk_group=top_groups, norm_topk_prob=renormalized, routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs, generator = Glm4MoeTopkRouter(config), torch.Generator().manual_seed(0)
    theirs.weight.data = torch.randn(24, 20, generator=generator)
    theirs.e_score_correction_bias += torch.randn(24, generator=generator)
    x = torch.randn(33, 20, generator=generator)
    with torch.no_grad():
        logits, weights, chosen = theirs(x)
    rule = routing(
        experts=24, top_k=5, scores="sigmoid", renormalized=renormalized, biased=True,
        groups=groups, top_groups=top_groups, scale=2.5,
    )  # fmt: skip
    found, ours = experts.choose(logits, theirs.e_score_correction_bias, rule)
    theirs_by_index, order = chosen.sort(1)
    by_index, own = found.sort(1)
    assert by_index.equal(theirs_by_index)
    torch.testing.assert_close(ours.gather(1, own), weights.gather(1, order))


@pytest.mark.parametrize(
    "changed",
    [{"top_k": 9}, {"groups": 3}, {"groups": 2, "top_groups": 3}, {"groups": 8},
     {"groups": 4, "top_groups": 1}],
)  # fmt: skip
def test_impossible_routing(changed: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="cannot be chosen"):
        routing(**changed)


def in_tiers(matrix: torch.Tensor, counts: tuple[int, int]) -> TieredMatrix:
    room = dict.fromkeys(("hbm", "host"), 2 * matrix.nbytes + 4096)
    with allocate_tiers(room, torch.device("cpu")) as tiers:
        placement = [*zip(tiers, counts, strict=True)]
        found = TieredMatrix.empty(tuple(matrix.shape), matrix.dtype, Rows(4), placement, tiers)
        for part, rows in found.rows:
            found.read(part).copy_(matrix[rows])
    return found


@pytest.mark.parametrize("tokens", [1, 2, 7, 300])
@pytest.mark.parametrize("remote", [0, 3, 38])
@pytest.mark.parametrize("skewed", [False, True])
def test_products_grouped_by_expert(tokens: int, remote: int, skewed: bool) -> None:
    """Also where all rows choose the same experts, and experts straddle row blocks and tiers."""
    count, hidden, ffn, rule = 6, 20, 25, routing(experts=6, top_k=2)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    router = torch.randn(count, hidden, generator=generator)
    if skewed:
        x, router[4], router[1] = x.abs(), 9.0, 8.0
    up = torch.randn(count * 2 * ffn, hidden, generator=generator)
    down = torch.randn(count * hidden, ffn, generator=generator)
    chosen = experts.route(x, router, None, rule)
    assert sum(chosen.counts.values()) == 2 * tokens
    if skewed:
        assert chosen.counts == {1: tokens, 4: tokens}
    inner = experts.gate_up(x, chosen, in_tiers(up, (38 - remote, remote)), 2 * ffn)
    ours = experts.down(inner, chosen, in_tiers(down, (15 - min(15, remote), min(15, remote))), x)

    wide = x.double()
    scores = (wide @ router.double().T).softmax(-1)
    weights, of = scores.topk(2)
    weights /= weights.sum(-1, keepdim=True)
    expected = wide.clone()
    for token, place in itertools.product(range(tokens), range(2)):
        matrix = up.double().view(count, 2 * ffn, hidden)[of[token, place]]
        gate, linear = (matrix @ wide[token]).chunk(2)
        out = down.double().view(count, hidden, ffn)[of[token, place]]
        expected[token] += weights[token, place] * (out @ (gate * gate.sigmoid() * linear))
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-3)


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x, router, up, down = (
        torch.randn(shape, generator=generator) for shape in ((5, 8), (4, 8), (32, 8), (32, 4))
    )
    rule, results = routing(experts=4, top_k=2), []
    for spoiled in (False, True):
        given = x.clone()
        given[2] = torch.nan if spoiled else 0.0
        chosen = experts.route(given, router, None, rule)
        inner = experts.gate_up(given, chosen, in_tiers(up, (4, 0)), 8)
        results.append(experts.down(inner, chosen, in_tiers(down, (1, 3)), given))
    others = [0, 1, 3, 4]
    torch.testing.assert_close(results[1][others], results[0][others])
    assert results[1][2].isnan().all()


def greedy(path: Path, **options: object) -> list[list[int]]:
    llm = LLM(path, device="cpu", batch_size=2, max_model_len=64, **options)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    return [list(completion.token_ids) for completion in found]


@pytest.mark.parametrize("name", MIXTURES)
def test_stacked_tensors_are_those_of_single_experts(name: str, tmp_path: Path) -> None:
    single = tiny_models.save(name, tmp_path / "single")
    stacked = tmp_path / "stacked"
    tiny_models.reference(name).save_pretrained(stacked, save_original_format=False)
    names = [key for file in stacked.glob("*.safetensors") for key in load_file(file)]
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in names)
    policy = Policy(offload_ratio=0.3)
    assert greedy(stacked, policy=policy) == greedy(single, policy=policy)


def test_random_weights_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    tiny_models.CONFIGS["glm4-moe"].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = {"architectures": ["Glm4MoeForCausalLM"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config | architecture))
    found = [
        greedy(tmp_path, load_format="dummy", policy=Policy(offload_ratio=ratio))
        for ratio in (0.0, 0.6)
    ]
    assert found[0] == found[1] and len({*map(tuple, found[0])}) > 1


def save_quantized(folder: Path, format: str) -> None:
    """Write a tiny Qwen3-MoE to folder/stored, and what its weights stand for to folder/dense."""
    config = Qwen3MoeConfig(
        **CONFIG, head_dim=64, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    settings, write = FORMATS[format]
    for name in ("stored", "dense"):
        model.save_pretrained(folder / name)
    stored, dense = (load_file(folder / name / FILE) for name in ("stored", "dense"))
    for name in [name for name in stored if name.removesuffix(".weight").endswith(KINDS)]:
        written, dense[name] = write(stored.pop(name).bfloat16())
        module = name.removesuffix("weight")
        stored |= {f"{module}{suffix}": each.contiguous() for suffix, each in written.items()}
    for name, tensors in (("stored", stored), ("dense", dense)):
        save_file(tensors, folder / name / FILE, metadata={"format": "pt"})
    file = folder / "stored" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


@pytest.mark.parametrize("format", ["fp8-block", "awq", "gptq-zeros", "ct-4bit-zeros", "nvfp4"])
def test_experts_are_stored_in_the_formats_of_checkpoints(format: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, format)
    policy = Policy(offload_ratio=0.4)
    llm = LLM(tmp_path / "stored", device="cpu", dtype="float32", batch_size=2, policy=policy)
    matrices = llm.engine.runner.weights.matrices
    assert isinstance(matrices["layers.0.experts_down"].format, QuantisedRows)
    assert greedy(tmp_path / "stored", dtype="float32", policy=policy) == greedy(
        tmp_path / "dense", policy=policy
    )


def test_a_quantized_checkpoint_with_other_experts(tmp_path: Path) -> None:
    save_quantized(tmp_path, "awq")
    path, name = tmp_path / "stored", "model.layers.0.mlp.experts.{}.up_proj.qweight"
    more = {name.format(6): torch.zeros(256, 12, dtype=torch.int32)}
    with pytest.raises(CannotRun, match=rf"does not account for tensor {name.format(6)}"):
        greedy(changed(path, lambda t: t.update(more)))
    with pytest.raises(CannotRun, match=rf"tensor {name.format(2)} is missing"):
        greedy(changed(path, lambda t: t.pop(name.format(2))))


def test_packed_for_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates alternate with ups expert by expert; no norm is folded; the router has 32 bits."""
    monkeypatch.setattr(loading, "PIECE_ELEMENTS", 40 * 384)
    path, cpu, card = tiny_models.save("glm4-moe", tmp_path, torch.bfloat16), "cpu", hopper(5)
    plan = LLM(path, device=cpu, batch_size=2, policy=Policy(offload_ratio=0.4)).plan
    tiers = allocate_tiers(tier_capacities(plan, packed=True), torch.device(cpu))
    with Checkpoint(path) as source:
        packing = Packing(tier_accesses(plan, card), card)
        source.check(decoder_of(plan.model))
        weights = load(source, plan, tiers, torch.device(cpu), packing=packing)
    layer = tiny_models.reference("glm4-moe", torch.bfloat16).model.layers[2].mlp
    gates, ups = layer.experts.gate_up_proj.data.chunk(2, dim=1)
    pairs = torch.stack([gates, ups], 2).flatten(0, 2)
    assert weights.matrices["layers.2.experts_gate_up"].dense().equal(pairs)
    down = weights.matrices["layers.2.experts_down"]
    assert down.dense().equal(layer.experts.down_proj.data.flatten(0, 1))
    assert down.for_kernels and all(part.nbytes for part in down.parts)
    router = weights.resident["layers.2.router.weight"]
    assert router.dtype == torch.float32 and router.equal(layer.gate.weight.data.float())
    assert weights.resident["layers.2.router.bias"].dtype == torch.float32


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    file = path / FILE
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


EXPERT = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (lambda t: t.pop(f"{EXPERT}7.up_proj.weight"),
         f"tensor {EXPERT}7.up_proj.weight is missing", "8 experts"),
        (lambda t: t.update({f"{EXPERT}8.up_proj.weight": torch.zeros(72, 384)}),
         f"does not account for tensor {EXPERT}8.up_proj.weight", "8 experts"),
        (lambda t: t.update({f"{EXPERT}3.down_proj.weight": torch.zeros(384, 80)}),
         f"tensor {EXPERT}3.down_proj.weight is 384x80, config.json says 384x72", "belong"),
        (lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.zeros(9, 384)}),
         "tensor model.layers.1.mlp.gate.weight is 9x384, config.json says 8x384", "belong"),
        (lambda t: t.update({f"{EXPERT}down_proj": torch.zeros(9, 384, 72)}),
         f"tensor {EXPERT}down_proj is 9x384x72, config.json says 8x384x72", "belong"),
        (lambda t: t.update({f"{EXPERT}down_proj": torch.zeros(8, 384, 72)}),
         f"tensor {EXPERT}0.down_proj.weight is also a part of {EXPERT}down_proj", "files"),
    ],
    ids=["missing", "one-too-many", "shape", "router", "stacked", "twice"],
)  # fmt: skip
def test_a_checkpoint_that_is_not_the_config(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, hint: str, tmp_path: Path
) -> None:
    path = changed(tiny_models.save("olmoe", tmp_path / "model"), change)
    with pytest.raises(CannotRun, match=re.escape(message)) as problem:
        greedy(path)
    assert hint in (problem.value.hint or "") and "\n" not in str(problem.value)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = tiny_models.save("glm4-moe", tmp_path / "model")
    before = greedy(path)

    def extra(layer: int) -> Callable[[dict[str, torch.Tensor]], object]:
        names = ("eh_proj", "mlp.experts.0.up_proj", "shared_head.norm")
        return lambda t: t.update(
            {f"model.layers.{layer}.{name}.weight": torch.ones(3) for name in names}
        )

    assert greedy(changed(path, extra(3))) == before
    with pytest.raises(CannotRun, match=r"does not account for tensor model\.layers\.4\.eh_proj"):
        greedy(changed(path, extra(4)))


@pytest.mark.parametrize(("rows", "share"), [(1, 0.0625), (8, 0.40328), (32, 0.87321), (4096, 1.0)])
def test_a_step_is_expected_to_read_the_experts_that_its_rows_choose(
    rows: int, share: float
) -> None:
    model = known_model("qwen3-30b-a3b")
    assert model is not None
    work = Workload(batch_size=rows, prompt_len=32, new_tokens=32, max_model_len=64)
    ops = {op.name: op for op in decode_ops(model, work)}
    up, down = ops["experts_gate_up"], ops["experts_down"]
    assert up.resident_bytes == 2 * down.resident_bytes == 128 * 1536 * 2048 * 2
    for op in (up, down):
        assert op.read_bytes / op.resident_bytes == pytest.approx(share, rel=1e-4)
        assert op.rows_per_weight == pytest.approx(rows * 8 / (128 * share), rel=1e-4)
    assert up.flops == 2 * rows * 8 * 1536 * 2048


def test_the_expectation_is_the_mean_of_random_choices() -> None:
    model = known_model("olmoe-1b-7b")
    assert model is not None
    matrix = next(m for m in decoder_of(model).matrices() if m.op == "experts_down")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(4000, 6, 64, generator=generator).topk(8).indices
    distinct = torch.tensor([len(of.unique()) for of in drawn]).double().mean()
    assert matrix.rows_read(6) / 2048 == pytest.approx(float(distinct), rel=0.01)


def test_experts_leave_hbm_before_what_every_step_reads() -> None:
    model = known_model("glm-4.5-air")
    assert model is not None
    work = Workload(batch_size=4, prompt_len=64, new_tokens=64, max_model_len=128)
    plan = make_plan(model, work, load_profile("h100-sxm"), Policy())
    assert plan.op("experts_gate_up").ratio > 0.6 > 0.05 > plan.op("qkv").ratio
    assert plan.op("gate_up").op.layers == 1 and plan.op("shared_down").op.layers == 45
    assert all(op.transport == "direct" for op in plan.ops if op.op.category == "experts")


def test_plan_prints_what_a_step_reads() -> None:
    options = ["plan", "--model", "qwen3-30b-a3b", "--profile", "h100-sxm", "--batch-size", "8"]
    text = " ".join(CliRunner().invoke(main, options).output.split())
    assert "128 in a layer, 8 for a token; a step of 8 rows is expected to read 51.6" in text
    assert "21.78 GiB of 54.00 GiB" in text
    found = json.loads(CliRunner().invoke(main, [*options, "--json"]).stdout)
    assert found["model"]["experts"]["read_share"] == pytest.approx(0.40328, rel=1e-4)
    assert found["profile"]["why_no_kernels"] is None


def test_a_gpu_says_which_experts_it_runs_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    card = properties("9.0", 228)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    model = known_model("qwen3-30b-a3b")
    assert model is not None
    work = Workload(batch_size=8, prompt_len=64, new_tokens=32, max_model_len=128)
    plan = make_plan(model, work, load_profile("h100-sxm"), Policy())
    assert why_plain_torch(plan, torch.device("cuda", 0)) is None
    assert model.mixture
    routing = dataclasses.replace(model.mixture.routing, experts=1024)
    mixture = dataclasses.replace(model.mixture, routing=routing)
    many = dataclasses.replace(model, num_layers=2, mixture=mixture)
    plan = make_plan(many, work, load_profile("h100-sxm"), Policy())
    why = why_plain_torch(plan, torch.device("cuda", 0))
    assert why == (
        "there are no kernels for qwen3-30b-a3b's experts, 8 of 1024 in 1 groups, "
        "768 rows by 2048 columns each"
    )


RAW = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip


def parsed(family: str, **changed: object) -> ModelConfig:
    return parse_model_config({**RAW, "model_type": family, **changed}, name="m")


def test_what_config_json_says_of_experts() -> None:
    qwen = parsed("qwen3_moe", num_experts=16, decoder_sparse_step=2, mlp_only_layers=[3])
    assert qwen.mixture is not None and qwen.mixture.dense_layers == (0, 2, 3, 4)
    assert qwen.mixture.routing == Routing(experts=16, top_k=8, renormalized=False)
    assert parsed("qwen3_moe", num_local_experts=16).mixture == parsed(
        "qwen3_moe", num_experts=16
    ).mixture  # fmt: skip
    assert parsed("qwen3_moe", decoder_sparse_step=9).mixture is None  # all layers are dense
    assert parsed("glm4_moe", first_k_dense_replace=6).mixture is None
    for layers in (5, "1", ["1"], {"1": 1}):
        with pytest.raises(UsageError, match=r"mlp_only_layers is .*, not a list of layers"):
            parsed("qwen3_moe", mlp_only_layers=layers)
    mixtral = parsed("mixtral").mixture
    assert mixtral is not None and mixtral.ffn_size == 96
    assert mixtral.routing == Routing(experts=8, top_k=2)
    glm = parsed("glm4_moe", n_shared_experts=2, first_k_dense_replace=2, n_group=4, topk_group=2)
    assert glm.mixture is not None and glm.mixture.shared_size == 2 * 1408
    assert glm.mixture.dense_layers == (0, 1) and glm.extra_layers == 1 and glm.rotary_dim == 8
    assert glm.mixture.routing == Routing(
        experts=128, top_k=8, scores="sigmoid", biased=True, groups=4, top_groups=2
    )
    bare = parsed("glm4_moe", first_k_dense_replace=0, num_nextn_predict_layers=0)
    assert bare.mixture is not None and not bare.mixture.dense_layers and not bare.extra_layers
    assert parsed("glm4_moe", num_nextn_predict_layers=None).extra_layers == 1
    assert parsed("glm4_moe", num_nextn_predict_layers=None, num_mtp_layers=2).extra_layers == 2


@pytest.mark.parametrize(
    ("family", "changed", "positions"),
    [
        ("qwen3_moe", {"sliding_window": 64, "max_window_layers": 6}, 512),
        ("qwen3_moe", {"sliding_window": 64, "use_sliding_window": True}, 64),
        ("mixtral", {"sliding_window": None}, 512),
        ("mixtral", {"sliding_window": 64}, 64),
        ("olmoe", {"sliding_window": 64}, 64),
    ],
)
def test_positions_end_with_the_sliding_window(
    family: str, changed: dict[str, object], positions: int
) -> None:
    assert parsed(family, **changed).max_positions == positions


@pytest.mark.parametrize(
    ("family", "changed", "error", "said"),
    [
        ("olmoe", {"clip_qkv": 8.0}, CannotRun, "clip_qkv is not supported"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, CannotRun, "a part of each head"),
        ("qwen3_moe", {"num_experts": "many"}, UsageError, 'num_experts is "many"'),
        ("mixtral", {"num_experts_per_tok": 9}, UsageError, "9 experts a token cannot be chosen"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, UsageError, "not 16 times 1.5"),
    ],
)
def test_experts_that_are_not_supported(
    family: str, changed: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        parsed(family, **changed)
