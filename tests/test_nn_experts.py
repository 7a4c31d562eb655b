"""SplitKExperts: experts of transformers' models, partly in a remote tier."""

import copy
import pickle

import pytest
import tiny_models
import torch
from torch import nn

from dakrun.nn import SplitKExperts, replace_experts

MIXTURES = [name for name, of in tiny_models.CONFIGS.items() if hasattr(of, "num_experts_per_tok")]
ORDER = [4, 0, 6, 2, 1, 5, 3]


class Experts(nn.Module):
    """Experts as transformers has them, row by row."""

    def __init__(self, count: int = 7, hidden: int = 20, ffn: int = 12) -> None:
        super().__init__()
        torch.manual_seed(count)
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * ffn, hidden))
        self.down_proj = nn.Parameter(torch.randn(count, hidden, ffn))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for number, weight in zip(index[row].tolist(), weights[row], strict=True):
                if number < len(self.down_proj):
                    gate, up = (self.gate_up_proj[number] @ x[row]).chunk(2)
                    out[row] += weight * (self.down_proj[number] @ (nn.functional.silu(gate) * up))
        return out


def choices(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    index = torch.rand(rows, 7, generator=generator).topk(3).indices
    x = torch.randn(rows, 20, generator=generator)
    return x, index, torch.rand(rows, 3, generator=generator)


@pytest.mark.parametrize("order", [None, ORDER])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@torch.no_grad()
def test_results_are_those_of_the_module(ratio: float, order: list[int] | None) -> None:
    experts = Experts()
    module = SplitKExperts.from_experts(experts, ratio=ratio, order=order)
    assert module.ratio == pytest.approx(ratio, abs=0.03)
    for rows in (0, 1, 9, 70):
        given = choices(rows)
        torch.testing.assert_close(module(*given), experts(*given), rtol=1e-4, atol=1e-4)
    x, index, weights = choices(5)
    index[1, 2] = index[3, 0] = 7  # of another process
    given = x, index, weights
    torch.testing.assert_close(module(*given), experts(*given), rtol=1e-4, atol=1e-4)
    module.close()


def test_state_dicts_are_those_of_the_module() -> None:
    experts = Experts()
    module = SplitKExperts.from_experts(experts, ratio=0.4, order=ORDER)
    saved = module.state_dict()
    assert saved.keys() == experts.state_dict().keys()
    assert all(saved[name].equal(of) for name, of in experts.state_dict().items())
    other = SplitKExperts(7, 20, 12, ratio=0.1)
    other.load_state_dict(saved)
    assert torch.equal(other(*choices(9)), module(*choices(9)))
    with pytest.raises(RuntimeError, match="size mismatch for down_proj"):
        other.load_state_dict(saved | {"down_proj": torch.zeros(7, 20, 13)})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"gate_up_proj\""):
        other.load_state_dict({"down_proj": saved["down_proj"]})


@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_models_of_transformers(name: str) -> None:
    model = copy.deepcopy(tiny_models.reference(name))
    ids = torch.randint(tiny_models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    replaced = replace_experts(model, ratio=0.5)
    dense = len(getattr(model.config, "mlp_only_layers", None) or [])
    dense += getattr(model.config, "first_k_dense_replace", 0) or 0
    assert len(replaced) == model.config.num_hidden_layers - dense
    assert all(model.get_submodule(at) is of for at, of in replaced.items())
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_modules_of_another_kind() -> None:
    experts = Experts()
    experts.act_fn = nn.GELU()
    with pytest.raises(ValueError, match="got the activation GELU"):
        SplitKExperts.from_experts(experts)
    with pytest.raises(ValueError, match="with the parameters weight, bias"):
        SplitKExperts.from_experts(nn.Linear(3, 3))
    assert replace_experts(nn.Sequential(nn.Linear(3, 3), experts)) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 1.5}, "a ratio from 0 to 1, got 1.5"),
        ({"remote": "disk"}, "host or peer:N"),
        ({"order": [0, 1, 1]}, "an order of 3 experts"),
        ({"dtype": torch.int8}, "a floating-point weight, got torch.int8"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitKExperts(3, 8, 8, **options)


def test_calls_that_do_not_fit() -> None:
    module = SplitKExperts.from_experts(Experts(), ratio=0.5)
    x, index, weights = choices(4)
    for given in (
        (x[:3], index, weights),
        (x.double(), index, weights),
        (x, index, weights[:, :2]),
    ):
        with pytest.raises(ValueError, match=r"expected rows as \[n, 20\] of torch.float32 on cpu"):
            module(*given)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(module)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(module)
    module.close()
    module.close()
    with pytest.raises(ValueError, match="this SplitKExperts is closed"):
        module(x, index, weights)
