"""Chains of quantized products with RMSNorms between them, on a GPU, or emulated on the CPU."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import emulated
import pytest
import torch
from packed_matrices import FEW_LAYOUTS, normal, quantised
from torch.nn import functional as F

from dakrun.formats.device_layout import Quantised
from dakrun.geometry import row_block_count
from dakrun.kernels.gemm import ScaledRows, factor_of, splitk_gemm

# An inner module, whose tensor maps are replaced.
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.runtime import card_of
from dakrun.launches import TierAccess, gemm_config, split_row_blocks
from dakrun.memory.matrix import TieredMatrix
from dakrun.models.functional import rms_norm

EPS = 1e-5
LAYERS = 3
ACCESS = (TierAccess(),)


@pytest.fixture
def device(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if kernel_device == "cpu":
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        monkeypatch.setattr(gemm, "atoms_map", emulated.atoms_map)
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class Layers:
    """The products of some layers: all heads of queries are those that o multiplies."""

    def __init__(
        self, layout: Quantised, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.card = card_of(device)
        shapes = ((hidden + 64, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
        self.matrices = [self._matrix(layout, *shape, dtype, device) for shape in shapes]
        sizes = (3.0, 0.4)  # of the norms of qkv and of gate-up
        self.norms = [
            size * (normal(hidden, dtype=dtype, device=str(device)).abs() + 0.2) for size in sizes
        ]
        self.factors = [factor_of(norm) for norm in self.norms]  # which a graph cannot read

    def _matrix(
        self, layout: Quantised, m: int, k: int, dtype: torch.dtype, device: torch.device
    ) -> TieredMatrix:
        splits = split_row_blocks(
            (row_block_count(m),), ACCESS, card=self.card, atom_bytes=layout.atom_bytes
        )
        return quantised(layout, m, k, splits, dtype=dtype, device=str(device))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden states behind the last layer, in the dtype of x."""
        qkv, o, up, down = (matrix.dense().to(x) for matrix in self.matrices)
        first, second = (norm.to(x) for norm in self.norms)
        for _ in range(LAYERS):
            heads = F.linear(rms_norm(x, first, EPS), qkv)[:, : x.shape[1]]
            x = x + F.linear(heads, o)
            gate_up = F.linear(rms_norm(x, second, EPS), up)
            x = x + F.linear(F.silu(gate_up[:, ::2]) * gate_up[:, 1::2], down)
        return x

    def launch(self, x: torch.Tensor, heads: torch.Tensor, *, pdl: bool) -> list[torch.Tensor]:
        """The same in place, by kernels. `heads` has room; the first norm is torch's."""
        n = len(x)
        qkv, o, up, down = self.matrices
        for_qkv = ScaledRows.empty(n, self.norms[0], self.factors[0])
        for_up = replace(for_qkv, weight=self.norms[1], factor=self.factors[1])
        joined, inner = x.new_empty(n, qkv.shape[0]), x.new_empty(n, down.shape[1])
        scaled = None
        first = rms_norm(x, self.norms[0], EPS)
        for _ in range(LAYERS):
            rows = first if scaled is None else scaled.rows
            self._multiply(rows, qkv, joined, scaled=scaled, pdl=pdl and scaled is not None)
            heads.copy_(joined[:, : x.shape[1]])
            self._multiply(heads, o, x, residual=x, scales=for_up)
            self._multiply(for_up.rows, up, inner, scaled=for_up, silu=True, pdl=pdl)
            self._multiply(inner, down, x, residual=x, scales=for_qkv, pdl=pdl)
            scaled = for_qkv
        return [x, joined, inner, for_qkv.rows]

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: TieredMatrix,
        out: torch.Tensor,
        *,
        silu: bool = False,
        **options: object,
    ) -> None:
        splits = [part.split for part in matrix.parts]
        config = gemm_config(
            len(x), splits, ACCESS, card=self.card, atom_bytes=matrix.format.atom_bytes
        )
        activation = "silu_mul" if silu else "none"
        splitk_gemm(x, matrix, config, out, activation=activation, eps=EPS, **options)  # type: ignore[arg-type]


def rows_and_layers(
    layout: Quantised, n: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Layers]:
    """Rows of X, and the layers that they pass."""
    hidden, ffn = (1024, 3072) if device.type == "cuda" else (136, 200)
    layers = Layers(layout, hidden, ffn, dtype, device)
    return normal(n, hidden, dtype=dtype, device=str(device)), layers


CASES = [
    pytest.mark.parametrize("layout", [FEW_LAYOUTS[0], FEW_LAYOUTS[-1]], ids=str),
    pytest.mark.parametrize("n", [1, 8, 13]),
    pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16]),
]


def of_all_cases(test: Callable[..., None]) -> Callable[..., None]:
    """`test` of each layout, number of rows and dtype."""
    for case in CASES:
        test = case(test)
    return test


@of_all_cases
def test_errors_are_at_most_twice_those_of_torch(
    layout: Quantised, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, layers = rows_and_layers(layout, n, dtype, device)
    layers.launch(kept := x.clone(), torch.empty_like(x), pdl=False)
    exact = layers.exact(x.double())
    errors = [(found.double() - exact).norm().item() for found in (kept, layers.exact(x))]
    assert errors[0] <= 2 * errors[1] and not math.isnan(errors[0])


@of_all_cases
def test_launches_that_overlap(
    layout: Quantised, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Nothing depends on how launches overlap, on a GPU those of a graph."""
    x, layers = rows_and_layers(layout, n, dtype, device)
    found = layers.launch(x.clone(), torch.empty_like(x), pdl=False)
    wanted = [tensor.clone() for tensor in found]
    launch = partial(layers.launch, again := x.clone(), torch.empty_like(x), pdl=True)
    if device.type == "cpu":
        assert all(map(torch.equal, launch(), wanted))
        return
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = launch()
    for delay in range(50):
        for out in outs[1:]:
            out.fill_(math.nan)
        again.copy_(x)
        torch.cuda._sleep(1000 * delay)  # cycles
        graph.replay()
        assert all(map(torch.equal, outs, wanted)), delay
