"""What tests/tools/format_speed.py checks before it times; kernels are emulated."""

import pytest
import torch
from cards import H200, hold_to, hopper
from emulated import atoms_map, boxes_map
from tools import format_speed
from tools.format_speed import FORMATS, ROWS, SHAPES, Bench, bar

from dakrun.kernels.gemm import splitk, tiled
from dakrun.kernels.runtime import card_of
from dakrun.memory.matrix import TieredMatrix

SHAPE = 64, 256


@pytest.fixture
def bench(emulated_kernels: object, monkeypatch: pytest.MonkeyPatch) -> Bench:
    torch.manual_seed(0)
    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", emulated_kernels)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    for module in (splitk, tiled):
        monkeypatch.setattr(module, "atoms_map", atoms_map)
    monkeypatch.setattr(tiled, "boxes_map", boxes_map)
    monkeypatch.setattr(format_speed, "CHAIN_BYTES", 1)
    hold_to(hopper(3), monkeypatch)
    return Bench(torch.float16, torch.device("cpu"), hopper(3))


def times(chains, *, replays: int, load: bool) -> list[list[float]]:
    """Launches of a chain once each, and times made up."""
    for launch, operands in chains:
        for number in range(operands):
            launch(number)
    return [[1e-6 * (1 + number)] * replays for number in range(len(chains))]


@pytest.mark.full
def test_values_are_checked_and_times_compared(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(format_speed, "seconds_round_robin", times)
    bench.measure({name: FORMATS[name] for name in ("16 bits", "nvfp4")}, SHAPE, [3])
    assert capsys.readouterr().out.split() == ["64x256", "3", "1.00", "2.000!0.34"]


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_have_the_size_of_normal_ones(bench: Bench, name: str) -> None:
    dense = next(bench.weights(FORMATS[name], SHAPE)).dense().float()
    assert dense.isfinite().all()
    assert 0.5 < dense.std() * SHAPE[1] ** 0.5 < 2


@pytest.mark.full
def test_a_wrong_product_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = next(bench.weights(FORMATS["int8"], SHAPE)), torch.randn(3, SHAPE[1]).half()
    right = weight.dense()
    right[5] *= 1.5
    monkeypatch.setattr(TieredMatrix, "dense", lambda self, device: right)
    with pytest.raises(ValueError, match=r"int8, \(64, 256\), 3 rows: an error of"):
        bench.check("int8", weight, [x])


def test_variants_and_bars() -> None:
    found = Bench(torch.float16, torch.device("cpu"), H200).variants(FORMATS.values(), SHAPES, ROWS)
    assert {source for source, _ in found} == {splitk.SOURCE, tiled.SOURCE}
    assert len(found) == len({(source, *macros.items()) for source, macros in found}) > 20
    bars = [bar(FORMATS[name], shape, n) for name, shape, n in (
        ("int4 g128", (28672, 4096), 8), ("int4 zeros", (4096, 4096), 1),
        ("nvfp4", (4096, 14336), 16),
        ("fp8 block", (4096, 4096), 8), ("int8", (28672, 7168), 64), ("int4 g32", (4096, 4096), 64),
        ("int8", (4096, 4096), 512), ("16 bits", (4096, 4096), 8),
    )]  # fmt: skip
    assert bars == pytest.approx([0.30, 0.48, 0.38, 0.62, None, 0.70, 1.10, None])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4 g128", "int4 zeros", "nvfp4", "fp8 block", "fp8 chan."])
def test_products_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels for few and for many rows, against float64."""
    monkeypatch.setattr(format_speed, "CHAIN_BYTES", 1)
    monkeypatch.setattr(format_speed, "LEAST_WEIGHTS", 1)
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(torch.float16, device, card_of(device))
    (weight,) = bench.weights(FORMATS[name], (1096, 520))
    xs = [torch.randn(n, 520, dtype=torch.float16, device=device) for n in (3, 13, 70)]
    bench.check(name, weight, xs)
