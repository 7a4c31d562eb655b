"""Estimates of quantized weights and of experts against what H200s and H100s took.

`dakrun profile` measures a card's own costs of these; those of the H200's profile are left out.
"""

import random
from dataclasses import replace

import pytest
from planned import known, work

from dakrun.config import Dtype, Workload
from dakrun.formats import Quantised, QuantisedRows
from dakrun.hardware import ESTIMATED, QUANTIZED, HardwareProfile, OpCosts, load_profile
from dakrun.models.hub import in_format
from dakrun.models.modules import Linear
from dakrun.models.operands import Scope
from dakrun.plan import Plan, Policy, make_plan
from dakrun.plan.ops import decode_ops, matrix_op
from dakrun.plan.roofline import compute_time, norm_time, predicted_time
from dakrun.plan.run_time import foretell
from dakrun.plan.running_requests import RequestLengths

ESTIMATES = dict.fromkeys(ESTIMATED)
H200 = replace(load_profile("h200-pcie5"), hbm_bytes_per_s=4.62e12, **ESTIMATES)  # as the figures'
H100 = load_profile("h100-pcie5")

LAYOUTS = {
    "int4": Quantised("int4", 128),
    "int4_zeros": Quantised("int4", 128, zeros=True),
    "e2m1": Quantised("e2m1", 16, 1),
    "eight_bits": Quantised("e4m3", 128, 4),
}
# Microseconds of products in chains on the H200, 2026-11-28, by shape of W and rows of X.
PRODUCTS = {
    ((28672, 4096), 8): (20.12, 22.09, 28.57, 30.59),
    ((4096, 14336), 8): (10.90, 12.07, 13.93, 16.01),
    ((4096, 4096), 8): (4.46, 4.85, 5.45, 5.87),
    ((28672, 4096), 16): (28.82, 29.90, 33.66, 35.62),
    ((4096, 14336), 16): (18.47, 19.56, 20.78, 21.68),
    ((4096, 4096), 16): (6.33, 6.69, 7.05, 7.42),
}
# The same of 28672x4096 and 8 rows on an H100, 2026-11-27. Its kernels for e2m1 were slower.
H100_PRODUCTS = {"int4": 22.4, "int4_zeros": 23.9, "eight_bits": 40.3}

# Milliseconds of decode steps of Qwen3-30B-A3B on the H200, all in HBM, by rows, 2026-11-29.
MIXTURE_STEPS = {1: 2.580, 8: 7.655, 64: 18.175}
# Microseconds of its norm, router, gate-up and down in one layer on an H100, by rows.
H100_LAYERS = {1: 45.0, 8: 190.0, 64: 444.0}
# Milliseconds of steps of 8 rows on the H200 in float16, by model and format, 2026-11-29.
QUANTIZED_STEPS = {("qwen3-8b", "fp8"): 2.554, ("llama-3-70b", "awq"): 14.000}

# Seconds of 2,000 requests on Llama-3-8B on the H200, by format; "auto" is 16 bits.
FILES = {"auto": 23.4, "fp8": 24.8, "awq": 23.0}


def product_us(kind: str, shape: tuple[int, int], n: int, profile: HardwareProfile) -> float:
    """Predicted microseconds of a product of quantized weights in HBM."""
    rows, cols = shape
    matrix = Linear(Scope(""), "weight", {"weight": rows}, cols)
    op = matrix_op(matrix, QuantisedRows(LAYOUTS[kind]), n=n, element_bytes=2)
    compute = compute_time(op, profile, "float16")
    return 1e6 * predicted_time(op, max(compute, op.read_bytes / profile.hbm_bytes_per_s), profile)


def step(model: str, format: str, dtype: Dtype, n: int, profile: HardwareProfile = H200) -> Plan:
    config = in_format(known(model).with_dtype(dtype), format)
    return make_plan(config, work(n), profile, Policy(offload_ratio=0.0))


def test_all_kinds_are_here() -> None:
    assert [layout.kind for layout in LAYOUTS.values()] == list(QUANTIZED) == list(LAYOUTS)
    assert Quantised("int8", 128, zeros=True).kind == "eight_bits"


@pytest.mark.parametrize(("shape", "n"), PRODUCTS)
def test_products_take_time_for_each_element(shape: tuple[int, int], n: int) -> None:
    """Of more than 8 rows, K has a say, too, which the plan leaves out."""
    for kind, us in zip(LAYOUTS, PRODUCTS[shape, n], strict=True):
        found = product_us(kind, shape, n, H200)
        assert found == pytest.approx(us, rel=0.10 if n <= 8 else 0.14), kind


@pytest.mark.parametrize("kind", H100_PRODUCTS)
def test_a_card_of_less_bandwidth(kind: str) -> None:
    """An SM expands as fast there, so that HBM and the SMs are about as fast."""
    found = product_us(kind, (28672, 4096), 8, H100)
    assert found == pytest.approx(H100_PRODUCTS[kind], rel=0.02)
    at_once = product_us(kind, (28672, 4096), 1, H100)
    assert at_once == found < product_us(kind, (28672, 4096), 9, H100), "a tile of X has 8 rows"


@pytest.mark.parametrize(("model", "format"), QUANTIZED_STEPS)
def test_steps_of_quantized_models(model: str, format: str) -> None:
    found = step(model, format, "float16", 8).predicted_s
    assert 1e3 * found == pytest.approx(QUANTIZED_STEPS[model, format], rel=0.07)


@pytest.mark.parametrize("format", ["awq", "fp8"])
@pytest.mark.parametrize(("n", "launched"), [(8, False), (16, False), (17, True)])
def test_norms_between_quantized_products_of_few_rows_are_no_launches(
    n: int, launched: bool, format: str
) -> None:
    """They take as long as those that matrices of 16 bits take in."""
    found, dense = (
        {op.op.name: norm_time(op.op, H200) for op in step("llama-3-8b", of, "float16", n).ops}
        for of in (format, "auto")
    )
    assert found["o"] == found["down"] == 0 and found["lm_head"] == dense["lm_head"]
    late = H200.kernel_model.late_start_seconds
    for name in ("qkv", "gate_up"):
        assert (found[name] == dense[name]) is not launched
        assert (found[name] > dense[name] + late) is launched


def test_measured_costs_take_the_place_of_estimates() -> None:
    """Each kind has its own; plans of other formats stay."""
    costs = OpCosts(rows=(8, 16, 64), seconds=(2e-6, 3e-6, 8e-6), efficiency=(0.5, 0.4, 0.2))
    measured = replace(H200, int4_zeros=costs)
    found, guessed = (step("llama-3-8b", "awq", "float16", 12, p) for p in (measured, H200))
    ops = zip(found.weights(), guessed.weights(), strict=True)
    for op, other in ops:
        if op.op.quantized:
            seconds = op.op.read_bytes / H200.hbm_bytes_per_s / 0.4 + norm_time(op.op, H200) + 3e-6
            assert list(op.predicted_s) == pytest.approx([seconds] * op.op.layers, rel=1e-3)
        else:
            assert op.predicted_s == other.predicted_s
    seconds = {step("llama-3-8b", "fp8", "float16", 12, p).predicted_s for p in (measured, H200)}
    assert len(seconds) == 1


@pytest.mark.parametrize("format", FILES)
def test_files_of_quantized_models(format: str) -> None:
    """Prompts and completions are log-normal, as those of the requests that were measured."""
    draw = random.Random(0)

    def length(mean: float, deviation: float, low: int, high: int) -> int:
        return min(max(int(draw.lognormvariate(mean, deviation)), low), high)

    lengths = [(length(4.7, 1.1, 8, 1500), length(4.9, 0.9, 4, 512)) for _ in range(2000)]
    prompts, new = (sum(of) for of in zip(*lengths, strict=True))
    workload = Workload(
        batch_size=1024, prompt_len=prompts // 2000, new_tokens=new // 2000, max_model_len=2012
    )
    config = in_format(known("llama-3-8b").with_dtype("bfloat16"), format)
    plan = make_plan(config, workload, H200, Policy(offload_ratio=0.0))
    found = foretell(plan, [RequestLengths(*of) for of in lengths])
    assert found.seconds * 360_402 / new == pytest.approx(FILES[format], rel=0.05)


@pytest.mark.parametrize("rows", MIXTURE_STEPS)
def test_steps_of_a_mixture(rows: int) -> None:
    plan = step("qwen3-30b-a3b", "auto", "bfloat16", rows)
    assert 1e3 * plan.predicted_s == pytest.approx(MIXTURE_STEPS[rows], rel=0.03)
    assert plan.bound_s < 0.76 * plan.predicted_s


@pytest.mark.parametrize("rows", H100_LAYERS)
def test_a_layer_of_a_mixture_on_another_card(rows: int) -> None:
    plan = step("qwen3-30b-a3b", "auto", "bfloat16", rows, H100)
    layer = sum(op.predicted_s[0] for op in plan.ops if op.op.category == "experts")
    assert 1e6 * layer == pytest.approx(H100_LAYERS[rows], rel=0.04)


def test_a_link_waits_for_the_router_too() -> None:
    """Which experts are read is known behind it."""
    up, down = (op for op in decode_ops(known("qwen3-30b-a3b"), work(8)) if op.chances)
    routed = norm_time(up, H200)
    assert routed > 7e-6 and norm_time(down, H200) == 0
    kernel = predicted_time(up, 1e-5, H200)
    assert predicted_time(up, 1e-5, H200, link=1e-3) > 1e-3 + routed
    costs = OpCosts(rows=(8,), seconds=(1e-3,), efficiency=(1.0,))
    slower = predicted_time(up, 1e-5, replace(H200, router=costs))
    assert slower - kernel == pytest.approx(1e-3 - routed, rel=0.01)


def test_quantized_experts_are_as_slow_as_both() -> None:
    times = {}
    for format in ("auto", "fp8", "awq"):
        plan = step("qwen3-30b-a3b", format, "bfloat16", 8)
        times[format] = sum(op.predicted_s[0] for op in plan.ops if op.op.category == "experts")
    assert times["awq"] < times["fp8"] < times["auto"] < 4 * times["awq"]
    fast = OpCosts(rows=(1,), seconds=(5.3e-6,), efficiency=(1.0,))
    plan = step("qwen3-30b-a3b", "awq", "bfloat16", 8, replace(H200, experts=fast))
    found = sum(op.predicted_s[0] for op in plan.ops if op.op.category == "experts")
    assert found == times["awq"], "expansion is what takes time"
