"""Popularity of experts: chances, their order in memory, and plans that place them by use."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from rich.console import Console

from dakrun.cli.main import main
from dakrun.config import ModelConfig, Popularity, Routing, SamplingParams, Workload
from dakrun.errors import UsageError
from dakrun.hardware import load_profile
from dakrun.kernels.experts.reference import choose
from dakrun.lab.bench.model_rows import limit_s
from dakrun.llm import LLM
from dakrun.models import decoder_of, known_model, popularity, read_model_config
from dakrun.models.experts import Experts
from dakrun.plan import Links, Plan, Policy, decode_ops, make_plan, run_bound
from dakrun.plan.expert_choices import deviation_s, mean_longer
from dakrun.plan.greedy import Curve, greedy_ratios
from dakrun.plan.linear_program import OpLines, best_ratios
from dakrun.plan.run_time import foretell
from dakrun.plan.running_requests import RequestLengths
from dakrun.terminal import summary
from dakrun.weights.random_routers import router_bias


def used(model: ModelConfig, found: Popularity | None) -> ModelConfig:
    assert model.mixture
    return replace(model, mixture=replace(model.mixture, popularity=found))


def qwen(exponent: float | None = None) -> ModelConfig:
    model = known_model("qwen3-30b-a3b")
    assert model
    return used(model, None if exponent is None else Popularity.zipf(48, 128, 8, exponent))


def work(rows: int) -> Workload:
    return Workload(batch_size=rows, prompt_len=32, new_tokens=32, max_model_len=64)


def planned(model: ModelConfig, rows: int, **policy: object) -> Plan:
    return make_plan(model, work(rows), load_profile("h100-sxm"), Policy(**policy))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_nothing_counted_is_like_nothing_known(rows: int) -> None:
    empty = Popularity(((0,) * 128,) * 48, "none")
    known, unknown = decode_ops(used(qwen(), empty), work(rows)), decode_ops(qwen(), work(rows))
    for one, other in zip(known, unknown, strict=True):
        assert one.read_bytes == pytest.approx(other.read_bytes, rel=1e-12)
        assert one.classes == other.classes == (1.0,)


def test_chances_are_those_of_counts_by_falling_use() -> None:
    found = Popularity(((5, 0, 11), (0, 8, 8)), "counted")
    assert found.orders == ((2, 0, 1), (1, 2, 0))
    chances = [2 * 12 / 19, 2 * 6 / 19, 2 * 1 / 19], [2 * 9 / 19, 2 * 9 / 19, 2 * 1 / 19]
    for rows in (1, 3):
        expected = [
            sum(1 - (1 - min(1.0, q)) ** rows for q in at) / 2 for at in zip(*chances, strict=True)
        ]
        assert found.chances(2, rows) == pytest.approx(expected)


@pytest.mark.parametrize("counts", [((1, 2), (3,)), ((1, -2),), ((1, 2.5),), ()])
def test_counts_that_are_no_table(counts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UsageError, match=r"x\.json: the counts are not a table"):
        Popularity(counts, "x.json")


def test_zipf_is_what_draws_without_replacement_choose() -> None:
    found = Popularity.zipf(2, 32, 4, 1.0)
    draw, seen = random.Random(0), [0] * 32
    for _ in range(4000):
        keys = [draw.expovariate(1 / (rank + 1)) for rank in range(32)]
        for rank in sorted(range(32), key=keys.__getitem__)[:4]:
            seen[rank] += 1
    for chance, count in zip(found.chances(4, 1), seen, strict=True):
        assert chance == pytest.approx(count / 4000, abs=0.05)
    assert sum(found.chances(4, 1)) == pytest.approx(4, rel=1e-4)
    assert found.orders[0] != found.orders[1]


@pytest.mark.parametrize("exponent", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "local"), [(1, 64), (4, 16), (16, 40)])
def test_the_mean_of_the_longer_time_is_that_of_random_choices(
    exponent: float, rows: int, local: int
) -> None:
    op = next(op for op in decode_ops(qwen(exponent), work(rows)) if op.name == "experts_down")
    units = op.units // 128 * local
    counts, rates = (units, op.units - units), (3.35e12, 52e9)
    # Both take as long on average, where chance matters most.
    reads = op.tier_reads(counts)
    rates = rates[1] * reads[0] / reads[1], rates[1]
    weights = torch.tensor([1 - (1 - p) ** (1 / rows) for p in op.chances], dtype=torch.float64)
    # Weights whose draws without replacement have these chances, by the clocks of Popularity.zipf.
    rings = -torch.log1p(-weights)
    generator = torch.Generator().manual_seed(0)
    clocks = torch.rand(3000, rows, 128, generator=generator, dtype=torch.float64)
    chosen = (-clocks.log() / rings).topk(8, largest=False).indices
    read = torch.zeros(3000, 128, dtype=torch.float64)
    read.scatter_(1, chosen.flatten(1), 1.0)
    expert = op.resident_bytes / 128
    times = [expert * part.sum(1) / rate for part, rate in
             zip((read[:, :local], read[:, local:]), rates, strict=True)]  # fmt: skip
    measured = float(torch.maximum(*times).mean())
    a, b = (float(time.mean()) for time in times)
    deviation = deviation_s(op, counts, 1, *rates)
    assert float((times[0] - times[1]).std()) == pytest.approx(deviation, rel=0.15)
    assert measured > max(a, b) * 1.005
    assert mean_longer(a, b, deviation) == pytest.approx(measured, rel=0.02)


def test_the_most_read_experts_lie_in_hbm() -> None:
    plans = [planned(qwen(exponent), 8, offload_ratio=0.5) for exponent in (None, 1.0)]
    alike, by_use = (plan.read_bytes(1) / sum(map(plan.read_bytes, (0, 1))) for plan in plans)
    assert alike > 0.4 and by_use < 0.25
    assert plans[0].predicted_s / plans[1].predicted_s > 1.8
    up = plans[1].op("experts_gate_up")
    assert up.resident_bytes(1) == pytest.approx(up.op.layers * up.op.resident_bytes / 2, rel=0.05)
    reads = sum(up.op.chances[64:]) / sum(up.op.chances)
    assert up.read_bytes(1) == pytest.approx(up.op.layers * up.op.read_bytes * reads, rel=0.1)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_the_greedy_over_classes_is_an_optimum(exponent: float) -> None:
    """For one remote tier, and totals that reach the ops' a: the linear program finds no better."""
    weights = [(8 - i) ** -exponent for i in range(8)]
    classes = tuple(w / sum(weights) for w in weights)
    curves = [
        Curve(6e9, 2e9, 0.7e-3, 3e12, 5e10, classes=classes),
        Curve(2e9, 2e9, 2e9 / 3.05e12, 3e12, 5e10),
        Curve(3e9, 1e9, 1e9 / 3.05e12, 3e12, 5e10, classes=classes),
    ]
    lines = [
        OpLines(c.resident, ((c.floor, {}), (0.0, {0: c.read / c.local_rate}),
                             (0.0, {1: c.read / c.remote_rate})), c.classes)
        for c in curves
    ]  # fmt: skip
    least, draw = sum(c.a * c.resident for c in curves), random.Random(0)

    def seconds(ratios: list[float]) -> float:
        return sum(c.time(x) for c, x in zip(curves, ratios, strict=True))

    for total in (least, 3e9, 6e9, 9e9):
        ours = greedy_ratios(curves, total)
        assert sum(x * c.resident for x, c in zip(ours, curves, strict=True)) == pytest.approx(
            total
        )
        best = best_ratios(lines, (11e9, 11e9), total)
        assert best is not None
        assert seconds(ours) <= seconds([x for _, x in best]) * (1 + 1e-6)
        for _ in range(200):  # nor is any other division faster
            moved, (i, j) = list(ours), draw.sample(range(3), 2)
            size = draw.random() * min(
                moved[i] * curves[i].resident, (1 - moved[j]) * curves[j].resident
            )
            moved[i] -= size / curves[i].resident
            moved[j] += size / curves[j].resident
            assert seconds(ours) <= seconds(moved) * (1 + 1e-9)


def test_segments_of_classes_rise_as_the_time_does() -> None:
    curve = Curve(6e9, 2e9, 1e-3, 3e12, 5e10, classes=(0.05, 0.15, 0.3, 0.5))
    slopes = [slope for slope, _ in curve.segments]
    assert slopes == sorted(slopes) and sum(n for _, n in curve.segments) == pytest.approx(1)
    x, seconds = 0.0, curve.time(0.0)
    for slope, length in curve.segments:
        x, seconds = x + length, seconds + slope * length
        assert curve.time(x) == pytest.approx(seconds)
    for x in (0.1, 0.3, 0.77):
        assert curve.ratio(curve.reads(x)) == pytest.approx(x)


def test_several_remote_tiers_hold_experts_by_use() -> None:
    plan = make_plan(
        qwen(1.0), work(8), load_profile("h200-nvlink-peer"),
        Policy(hbm_budget=20 << 30, peer_budget=20 << 30, remote=("peer", "host")),
    )  # fmt: skip
    op = plan.op("experts_gate_up")
    held = [(tier, op.resident_bytes(tier)) for tier in range(3) if op.resident_bytes(tier)]
    means = [op.read_bytes(tier) / size for tier, size in held]
    assert len(held) > 1 and means == sorted(means, reverse=True)
    assert sum(map(op.read_bytes, range(3))) == pytest.approx(op.op.layers * op.op.read_bytes)


def counts_of(config: ModelConfig) -> Popularity:
    """Random counts in which all ranks occur."""
    assert config.mixture
    layers = config.num_layers - len(config.mixture.dense_layers)
    draw = random.Random(3)
    table = [draw.sample(range(90), config.mixture.routing.experts) for _ in range(layers)]
    return Popularity(tuple(map(tuple, table)), "counted")


def test_matrices_stack_experts_in_their_order(tmp_path: Path) -> None:
    config = read_model_config(tiny_models.save("glm4-moe", tmp_path))
    popular = used(config, counts_of(config))
    modules = decoder_of(config).matrices(), decoder_of(popular).matrices()
    for matrix, other in zip(*modules, strict=True):
        if not isinstance(matrix, Experts):
            assert matrix.sources == other.sources
            continue
        assert isinstance(other, Experts)
        assert list(other.in_checkpoint()) == list(matrix.sources) != list(other.sources)


PROMPTS = [[5, 6, 7, 8], [9], list(range(10, 40))]
PARAMS = SamplingParams(max_tokens=12)


def written(config: ModelConfig, path: Path) -> Path:
    """A file with the counts of `counts_of`."""
    popularity.keep(config, counts_of(config).counts)
    popularity.kept_path(config).rename(path)
    return path


def answers(model: Path, **options: object) -> list[list[int]]:
    with LLM(model, device="cpu", batch_size=2, max_model_len=64, **options) as llm:
        return [list(one.token_ids) for one in llm.generate(PROMPTS, PARAMS, progress=False)]


@pytest.mark.parametrize("name", ["olmoe", "glm4-moe"])
def test_the_order_of_experts_changes_no_token(name: str, tmp_path: Path) -> None:
    """With single and with stacked tensors of experts, bits of logits included."""
    model = tiny_models.save(name, tmp_path / "model")
    file = str(written(read_model_config(model), tmp_path / "counts.json"))
    policy = Policy(offload_ratio=0.4)
    expected = answers(model, popularity="uniform")
    assert answers(model, popularity=file, policy=policy) == expected
    stacked = tmp_path / "stacked"
    tiny_models.reference(name).save_pretrained(stacked, save_original_format=False)
    assert answers(stacked, popularity=file, policy=policy) == expected
    scored = [
        llm.generate([PROMPTS[2]], SamplingParams(max_tokens=3, logprobs=2), progress=False)
        for llm in (
            LLM(model, device="cpu", batch_size=1, max_model_len=64, popularity=of)
            for of in ("uniform", file)
        )
    ]
    first, second = (of[0].logprobs for of in scored)
    assert first is not None and first == second


def test_a_run_counts_what_the_next_plan_uses(tmp_path: Path) -> None:
    model = tiny_models.save("olmoe", tmp_path / "model")
    config = read_model_config(model)
    assert config.mixture
    with LLM(model, device="cpu", batch_size=3, max_model_len=64) as llm:
        assert llm.plan.model.mixture == config.mixture
        llm.generate(PROMPTS, PARAMS, progress=False)
        use, report = llm.engine.runner.expert_use, llm.report()
    console = Console(file=(shown := io.StringIO()), width=200)
    summary.render(report, console, verbose=True)
    assert "placed by use (uniform); a step is predicted to read" in shown.getvalue()
    assert use is not None
    counts, tokens = use.counts(), sum(map(len, PROMPTS)) + 3 * 11
    top_k = config.mixture.routing.top_k
    assert [sum(layer) for layer in counts] == [tokens * top_k] * len(counts)
    found = report["experts"]
    assert found["popularity"] == "uniform" and found["measured_local_read_share"] == 1.0
    assert top_k <= found["measured_per_step"] <= min(3 * top_k, config.mixture.routing.experts)
    assert found["predicted_at_mean_batch"] == pytest.approx(found["predicted_per_step"])

    with LLM(model, device="cpu", batch_size=3, max_model_len=64) as llm:
        assert llm.plan.model.mixture and llm.plan.model.mixture.popularity
        assert llm.plan.model.mixture.popularity.counts == tuple(map(tuple, counts))
        llm.generate(PROMPTS[:1], PARAMS, progress=False)
        assert llm.report()["experts"]["popularity"] == "earlier runs"
    kept = json.loads(popularity.kept_path(config).read_text())["counts"]
    assert sum(map(sum, kept)) > sum(map(sum, counts))
    assert not list(popularity.kept_path(config).parent.glob(".*"))
    options = ["plan", "--model", str(model), "--profile", "h100-sxm", "--json"]
    planned = json.loads(CliRunner().invoke(main, options).stdout)["model"]["experts"]
    assert planned["popularity"] == "earlier runs"
    alike = json.loads(CliRunner().invoke(main, [*options, "--popularity", "uniform"]).stdout)
    assert alike["model"]["experts"]["popularity"] == "uniform"


def test_measured_reads_in_hbm_are_those_of_the_placement(tmp_path: Path) -> None:
    model = tiny_models.save("olmoe", tmp_path / "model")
    written(read_model_config(model), file := tmp_path / "counts.json")
    with LLM(
        model, device="cpu", batch_size=3, max_model_len=64, popularity=str(file),
        policy=Policy(offload_ratio=0.5),
    ) as llm:  # fmt: skip
        llm.generate(PROMPTS, PARAMS, progress=False)
        found, use = llm.report()["experts"], llm.engine.runner.expert_use
        assert use is not None
        experts = use.table.shape[-1]
        local = total = 0.0
        for layer, of in enumerate(use.table[0, :, 1].tolist()):
            for name, weight in (("experts_gate_up", 2), ("experts_down", 1)):
                placed = llm.plan.op(name)
                rows = placed.placement[layer][0] / placed.op.units * experts
                for at, count in enumerate(of):
                    local += weight * count * min(1.0, max(0.0, rows - at))
                    total += weight * count
    assert 0 < found["measured_local_read_share"] < 1
    assert found["measured_local_read_share"] == pytest.approx(local / total, rel=0.02)


def test_random_weights_neither_count_nor_use_counts(tmp_path: Path) -> None:
    model = tiny_models.save("olmoe", tmp_path / "model")
    answers(model, load_format="dummy")
    assert not popularity.kept_path(read_model_config(model)).parent.exists()


@pytest.mark.parametrize("found", ["{", '{"dakrun_popularity": 2, "counts": {}}'])
def test_a_file_in_the_cache_that_is_of_no_use_is_written_again(found: str, tmp_path: Path) -> None:
    config = read_model_config(tiny_models.save("olmoe", tmp_path))
    path = popularity.kept_path(config)
    popularity.keep(config, counts_of(config).counts)
    path.write_text(found)
    assert popularity.with_popularity(config, "auto") == config
    popularity.keep(config, counts_of(config).counts)
    assert popularity.read(path, config, "x").counts == counts_of(config).counts


def test_kept_counts_fade(tmp_path: Path) -> None:
    """Those of another revision of a model, whose tokens choose other experts, give way."""
    config = read_model_config(tiny_models.save("olmoe", tmp_path))
    assert config.mixture
    layers = len(popularity.layers_of(config))
    experts, top_k = config.mixture.routing.experts, config.mixture.routing.top_k

    def kept_after(tokens: int, first: int) -> tuple[int, ...]:
        """Counts of a layer after a run of so many tokens, which chose experts `first` and on."""
        chosen = [tokens * (first <= expert < first + top_k) for expert in range(experts)]
        popularity.keep(config, [chosen] * layers)
        found = popularity.read(popularity.kept_path(config), config, "x").counts
        assert len(set(found)) == 1
        return found[0]

    most = popularity.KEPT_TOKENS
    assert kept_after(most // 2, 0)[0] == kept_after(most // 2, top_k)[0] == most // 2
    assert kept_after(most // 2, top_k)[0] == most // 4
    old, *_, new = kept_after(most - 8, experts - top_k)
    assert old < 8 and new == most - 8
    assert sum(kept_after(2 * most, 0)) == 2 * most * top_k, "those of the run alone"
    assert kept_after(1, experts - top_k)[-1] == 1


def refused(model: str, name: str) -> str:
    """The error line of a plan with that popularity."""
    options = ["plan", "--model", model, "--profile", "h100-sxm", "--popularity", name]
    result = CliRunner().invoke(main, options)
    error, hint = result.stderr.strip().splitlines()
    assert result.exit_code == 2 and "hint: " in hint
    return error


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"experts": 9}, "counts of tiny, whose experts is 9; that of qwen3-30b-a3b is 128"),
        ({"layers": [0]}, "whose layers is 1 layers; that of qwen3-30b-a3b is 48 layers"),
        ({"family": "olmoe"}, "whose family is olmoe"),
        ({"counts": [[1]]}, "counts is not a table of 48 layers by 128 experts"),
        ({"counts": [[0.5] * 128] * 48}, "the counts are not a table of integers"),
        ({"dakrun_popularity": 2}, "not a popularity file: dakrun_popularity is 2, not 1"),
    ],
)
def test_popularity_files_that_are_not_of_the_model(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    model, path = qwen(), tmp_path / "counts.json"
    popularity.keep(model, [[1] * 128] * 48)
    data = json.loads(popularity.kept_path(model).read_text()) | {"model": "tiny"}
    path.write_text(json.dumps(data | changed))
    assert message in refused("qwen3-30b-a3b", str(path))


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ("qwen3-30b-a3b", "zipf:much", "'much' is not a number from 0 to 10"),
        ("qwen3-30b-a3b", "nowhere.json", "--popularity nowhere.json: no such file"),
        ("opt-6.7b", "zipf:1", "--popularity zipf:1: opt-6.7b has no experts"),
    ],
)
def test_popularities_that_do_not_exist(model: str, name: str, message: str) -> None:
    assert message in refused(model, name)


def test_plan_says_by_which_use_experts_are_placed() -> None:
    options = ["plan", "--model", "qwen3-30b-a3b", "--profile", "h100-sxm", "--batch-size", "8",
               "--offload-ratio", "0.5", "--popularity", "zipf:1.0"]  # fmt: skip
    text = " ".join(CliRunner().invoke(main, options, catch_exceptions=False).output.split())
    assert "of it in hbm; placed by use (zipf:1)" in text


@pytest.mark.parametrize(
    "rule",
    [
        Routing(experts=64, top_k=8, biased=True),
        Routing(experts=24, top_k=4, scores="sigmoid", biased=True, groups=4, top_groups=3),
    ],
    ids=["softmax", "groups"],
)
def test_the_bias_of_a_random_router_makes_tokens_choose_by_popularity(rule: Routing) -> None:
    exponent = 0.6 if rule.groups > 1 else 1.0  # few groups do not allow any popularity
    wanted = Popularity.zipf(3, rule.experts, rule.top_k, exponent)
    bias = router_bias(wanted, 2, rule, 0.9)
    logits = 0.9 * torch.randn(4000, rule.experts, generator=torch.Generator().manual_seed(5))
    chosen, weights = choose(logits, bias, rule)
    found = chosen.flatten().bincount(minlength=rule.experts) / 4000
    expected = torch.tensor(wanted.chances(rule.top_k, 1))
    assert (found[list(wanted.orders[2])] - expected).abs().max() < 0.05
    torch.testing.assert_close(weights.sum(1), torch.ones(4000))


def test_bench_measures_random_routers_by_popularity(tmp_path: Path) -> None:
    model = tiny_models.save("mixtral", tmp_path)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_local_experts": 32, "intermediate_size": 64}
    (model / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(
        main,
        ["bench", "--model", str(model), "--load-format", "dummy", "--popularity", "zipf:1.0",
         "--expert-order", "use", "--expert-order", "number", "--batch-size", "12", "--ratio",
         "0.5",
         "--new-tokens", "12", "--prompt-len", "8", "--dtype", "bfloat16", "--strategy", "uniform",
         "--json"],
        catch_exceptions=False,
    )  # fmt: skip
    by_use, by_number = json.loads(result.stdout)["rows"]
    assert (by_use["order"], by_number["order"]) == ("use", "number")
    assert by_use["experts_per_step"] == by_number["experts_per_step"]  # the same choices
    assert by_use["experts_per_step"] == pytest.approx(
        by_use["predicted_experts_per_step"], rel=0.25
    )
    assert by_use["local_read_share"] > by_number["local_read_share"] + 0.1
    assert by_use["local_read_share"] == pytest.approx(
        by_use["predicted_local_read_share"], abs=0.12
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "opt-6.7b", "--expert-order", "number"], "--expert-order is for mixtures"),
        (["--model", "opt-6.7b", "--popularity", "zipf:1"], "opt-6.7b has no experts"),
        (["--kernel", "gemm", "--popularity", "zipf:1"], "--popularity is an option of"),
    ],
)
def test_bench_refuses(options: list[str], message: str) -> None:
    given = (
        ["bench", *options]
        if "--kernel" in options
        else ["bench", "--load-format", "dummy", *options]
    )
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 2 and message in result.stderr


def test_a_run_of_few_rows_is_expected_to_read_few_experts() -> None:
    plans = [planned(qwen(exponent), 64, offload_ratio=0.5) for exponent in (None, 1.0)]
    work = {"requests": 640, "prompt_tokens": 640, "steps": 1000, "kv_bytes": 0.0}
    for plan in plans:
        full, thin = (run_bound(plan, new_tokens=1000 * n, **work) for n in (64, 4))
        assert full == pytest.approx(1000 * plan.read_bytes(1) / 52e9, rel=0.2)
        assert thin < full / 2
    lengths = [(16, 24, 0)] * 80
    slow, fast = (foretell(plan, [RequestLengths(*of) for of in lengths]).seconds for plan in plans)
    assert fast < 0.8 * slow


def test_the_limit_of_a_step_is_that_of_the_experts_that_were_read() -> None:
    plan = planned(qwen(), 8, offload_ratio=0.5)
    links, reads = Links.of(plan.profile, plan.tiers[1:]), {}
    expected = limit_s(plan, links)
    for op in plan.ops:
        if op.op.chances:
            reads[op.op.name] = [op.op.tier_reads(of) for of in op.placement]
    assert limit_s(plan, links, reads) == pytest.approx(expected)
    half = {name: [[n / 2 for n in of] for of in layers] for name, layers in reads.items()}
    assert expected / 2 < limit_s(plan, links, half) < 0.6 * expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "glm4-moe"])
def test_on_a_gpu_the_order_of_experts_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Choices are counted in the graphs of steps, too, and equal those of plain torch's count."""
    model = tiny_models.save(name, tmp_path / "model", torch.bfloat16)
    config = read_model_config(model)
    assert config.mixture
    file, found = str(written(config, tmp_path / "counts.json")), []
    params = SamplingParams(max_tokens=24, logprobs=1, ignore_eos=True)
    for of, ratio in (("uniform", 0.0), (file, 0.0), (file, 0.5), ("uniform", 0.5)):
        with LLM(
            model, device="cuda", batch_size=2, max_model_len=64, popularity=of,
            policy=Policy(offload_ratio=ratio, strategy="uniform"),
        ) as llm:  # fmt: skip
            assert llm.fallback is None
            results = llm.generate(PROMPTS, params, progress=False)
            use, report = llm.engine.runner.expert_use, llm.report()["experts"]
            assert use is not None
            found.append([(one.token_ids, one.logprobs) for one in results] + [use.counts()])
            tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * 23
            each = tokens * config.mixture.routing.top_k
            assert [sum(layer) for layer in use.counts()] == [each] * len(use.counts())
            assert 0 < report["measured_per_step"] <= config.mixture.routing.experts
            share = report["measured_local_read_share"]
            assert share == 1.0 if ratio == 0.0 else 0 < share < 1
    assert found[1] == found[2] == found[3] == found[0]
