"""Norms are those of the models: a rounding apart, and as exact as torch's."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from cards import H200, SMALL, hold_to
from packed_matrices import normal
from torch.nn import functional as F

from dakrun.geometry import NORMALIZE_MAX_COLS
from dakrun.hardware import Card
from dakrun.kernels import HeadNorms, normalize, normalize_heads
from dakrun.kernels.runtime import DTYPES, jit
from dakrun.models.functional import rms_norm

EPS = 1e-5


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """By how many numbers of their dtype two tensors of finite ones differ at most."""

    def ordered(values: torch.Tensor) -> torch.Tensor:
        bits = values.cpu().contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [8, 1000, NORMALIZE_MAX_COLS])
def test_rms_norm(cols: int, dtype: torch.dtype, kernel_device: str) -> None:
    x, weight = (normal(*n, cols, dtype=dtype, device=kernel_device) for n in ((3,), ()))
    x[1] *= 100
    x[2] = 0
    out = torch.full_like(x, torch.nan)
    assert normalize(x, out, "rms", eps=EPS, weight=weight) is out
    # A rounding that falls to the other side moves the product by up to two.
    assert ulps(out, rms_norm(x, weight, EPS)) <= 2
    normalize(x, out, "rms", eps=EPS)
    assert ulps(out, rms_norm(x, torch.ones_like(weight), EPS)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [40, 4096, 8200])
def test_layer_norm(cols: int, dtype: torch.dtype, kernel_device: str) -> None:
    x, weight = (normal(*n, cols, dtype=dtype, device=kernel_device) for n in ((4,), ()))
    bias = weight.flip(0).contiguous()
    x[1] = 0.01 * x[1] + 30  # a mean far larger than the distances to it
    x[2] = 7
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        out, behind = x.new_full((10, cols), torch.nan).split((4, 6))
        normalize(x, out, "layer", eps=EPS, weight=w, bias=b, pad_grid=w is None)
        assert behind.isnan().all()
        wide = [None if vector is None else vector.double() for vector in (w, b)]
        exact = F.layer_norm(x.double(), (cols,), *wide, EPS)
        errors = [
            (found.double() - exact).abs().amax(-1)
            for found in (out, F.layer_norm(x, (cols,), w, b, EPS))
        ]
        assert bool((errors[0] <= 2 * errors[1] + 1e-6).all()), errors


@pytest.mark.parametrize(
    ("card", "n", "launch"),
    [(H200, 1, (132, H200.ring_bytes)), (H200, 17, (132, 0)), (SMALL, 2, (2, 0))],
)
def test_a_padded_grid_takes_half_of_each_sm(
    card: Card, n: int, launch: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def record(ctas: int, threads: int, args: Any, *, shared_bytes: int, pdl: bool) -> None:
        asked.append((ctas, shared_bytes))

    monkeypatch.setattr(jit, "kernel", lambda *_: SimpleNamespace(launch=record))
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    hold_to(card, monkeypatch)
    x = torch.zeros(n, 64, dtype=torch.float16)
    normalize(x, x, "rms", eps=EPS, pad_grid=True)
    assert asked == [launch]


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_in_place(norm: Literal["rms", "layer"], kernel_device: str) -> None:
    x = normal(3, 520, dtype=torch.bfloat16, device=kernel_device)
    wanted = normalize(x, torch.empty_like(x), norm, eps=EPS)
    assert torch.equal(normalize(x, x, norm, eps=EPS), wanted)


def test_rows_that_lie_apart(kernel_device: str) -> None:
    """A part of the columns of a matrix, in place: the others keep their values."""
    x = normal(3, 520, dtype=torch.bfloat16, device=kernel_device)
    before, part = x.clone(), x[:, 104:304]
    wanted = normalize(part.contiguous(), torch.empty(3, 200).to(part), "rms", eps=EPS)
    normalize(part, part, "rms", eps=EPS)
    assert torch.equal(part, wanted)
    assert torch.equal(x[:, :104], before[:, :104]) and torch.equal(x[:, 304:], before[:, 304:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64)}, r"x as \[N, K\] in 16 bits, got \[3, 64\] of torch.float32"),
        ({"x": torch.zeros(3, 12).half()}, "columns up to 16384, got 12"),
        ({"x": torch.zeros(3, 16392).half()}, "columns up to 16384, got 16392"),
        (
            {"x": torch.zeros(64, 3, 2)[..., 0].half().T},
            "rows of x and out to be contiguous and aligned",
        ),
        ({"out": torch.zeros(3, 72).half()}, r"out as \[3, 64\] of torch.float16"),
        ({"weight": torch.zeros(64).bfloat16()}, r"weight as \[64\] .* torch.bfloat16"),
        ({"bias": torch.zeros(65).half()[1:]}, "bias to be contiguous and aligned to 16 bytes"),
        ({"norm": "rms"}, "no bias"),
        ({}, "current GPU"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": torch.zeros(3, 64).half(), "out": torch.zeros(3, 64).half()}
    given |= {"norm": "layer", "eps": EPS, "bias": torch.zeros(64).half(), **change}
    with pytest.raises(ValueError, match=message):
        normalize(**given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 64), (6, 2, 80), (9, 3, 128)])
def test_heads_are_normalized_in_place(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kernel_device: str
) -> None:
    qkv = normal(5, heads + 2 * kv_heads, dim, dtype=dtype, device=kernel_device)
    weights = [normal(dim, dtype=dtype, device=kernel_device) for _ in range(2)]
    before = qkv.clone()
    normalize_heads(qkv, HeadNorms(*weights, EPS), kv_heads=kv_heads)
    parts = (heads, kv_heads, kv_heads)
    q, k, v = before.split(parts, 1)
    for found, x, weight in zip(qkv.split(parts, 1), (q, k), weights, strict=False):
        assert ulps(found, rms_norm(x, weight, EPS)) <= 2
    assert torch.equal(qkv.split(parts, 1)[2], v)


def test_operands_of_head_norms_are_checked(kernel_device: str) -> None:
    qkv = normal(2, 4, 64, dtype=torch.float16, device=kernel_device)
    weight = qkv[0, 0].clone()
    norms = HeadNorms(weight, weight, EPS)
    with pytest.raises(ValueError, match="expected"):
        normalize_heads(qkv, norms, kv_heads=2)
    with pytest.raises(ValueError, match="q_weight"):
        normalize_heads(qkv, HeadNorms(weight[:8], weight, EPS), kv_heads=1)
