"""SplitKGEMM: nn.Linear's results and state dict at any ratio; on a GPU also in CUDA graphs."""

import copy
import doctest
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cards import H200, hold_to
from peers import readable_peer
from tiny_tokenizer import make_tokenizer_files
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import dakrun.nn
from dakrun.errors import CannotRun, UsageError
from dakrun.formats import PACKED16, Quantised, WeightFormat
from dakrun.geometry import row_block_count
from dakrun.kernels.gemm import dispatch as products
from dakrun.kernels.runtime import DTYPES
from dakrun.launches import TierAccess
from dakrun.memory.matrix import TieredMatrix
from dakrun.nn import SplitKGEMM, replace_linears
from dakrun.nn import replace as replace_module

RATIOS = (0.0, 0.1, 1.0)
ACCESS = TierAccess(sms=8, window_bytes=256 * 1024)


def make_linear(
    cols: int, rows: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    torch.manual_seed(rows * cols)
    return nn.Linear(cols, rows, bias=bias, dtype=dtype)


def tiny_llama(*, tied: bool = False) -> LlamaForCausalLM:
    """A random model whose down_proj has columns that are no multiple of 64, but of 8."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=331, hidden_size=256, intermediate_size=1096, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=160,
        initializer_range=0.08, tie_word_embeddings=tied, eos_token_id=None, bos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("cols", "rows"), [(1500, 200), (2048, 130), (3, 1)])
def test_the_fallback_computes_what_a_linear_does(
    ratio: float, bias: bool, cols: int, rows: int
) -> None:
    linear = make_linear(cols, rows, bias=bias)
    module = SplitKGEMM.from_linear(linear, ratio=ratio)
    wide = torch.randn(6, 2 * cols)
    for x in (torch.randn(cols), torch.randn(2, 5, cols), torch.randn(0, cols), wide[::2, :cols]):
        assert module(x).shape == (*x.shape[:-1], rows)
        torch.testing.assert_close(module(x), linear(x), rtol=1e-4, atol=1e-5)
    assert not module(wide[:, :cols].requires_grad_()).requires_grad


def test_row_blocks_lie_where_the_ratio_says() -> None:
    linear = make_linear(2048, 156)  # 20 row blocks, the last of 4 rows
    for ratio, remote in ((0, 0), (0.1, 12), (0.12, 12), (0.13, 20), (1, 156)):
        module = SplitKGEMM.from_linear(linear, ratio=ratio, remote="peer:3")
        assert not module.weight.for_kernels
        assert module.ratio == pytest.approx(remote / 156)
        there = [part for part in module.weight.parts if part.tier == "peer:3"]
        assert sum(part.nbytes for part in there) == remote * 2048 * 4
        assert all(tier.free == 0 for tier in module._tiers.values())
    assert "in_features=2048, out_features=156, bias=True, ratio=1, remote=peer:3" in str(module)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ratio", RATIOS)
def test_state_dicts_are_those_of_a_linear(ratio: float, bias: bool, tmp_path: Path) -> None:
    linear, other = (make_linear(1500, rows, bias=bias) for rows in (200, 200))
    nn.init.normal_(other.weight)
    module = SplitKGEMM.from_linear(linear, ratio=ratio)
    assert_same_state(module, linear)
    blank = nn.Linear(1500, 200, bias=bias)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    blank.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same_state(blank, linear)
    placed = [(part.tier, part.arrays[0].data_ptr()) for part in module.weight.parts]
    module.load_state_dict(other.state_dict())
    assert [(part.tier, part.arrays[0].data_ptr()) for part in module.weight.parts] == placed
    assert_same_state(module, other)
    fresh = SplitKGEMM(1500, 200, bias, ratio=ratio)
    fresh.load_state_dict(other.double().state_dict())  # a dtype is converted, as torch does it
    assert fresh.state_dict()["weight"].dtype == torch.float32
    torch.testing.assert_close(fresh.state_dict()["weight"], module.state_dict()["weight"])


def assert_same_state(module: nn.Module, other: nn.Module) -> None:
    mine, theirs = module.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape)
        assert torch.equal(value.cpu(), theirs[name].cpu())


def test_state_dicts_of_a_larger_model() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(70, 90), nn.ReLU(), nn.Sequential(nn.Linear(90, 8)))

    plain, mixed, x = net(), net(), torch.randn(4, 70)
    replaced = replace_linears(mixed, ratio=0.5)
    assert list(replaced) == ["0", "2.0"] and replaced["2.0"] is mixed[2][0]
    mixed.load_state_dict(plain.state_dict())
    assert_same_state(mixed, plain)
    torch.testing.assert_close(mixed(x), plain(x))
    net().load_state_dict(mixed.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"0.weight": torch.zeros(9, 7)},
        {"0.weight": torch.zeros(8)},
        {"0.bias": torch.zeros(9)},
        {"0.weight": None},
        {"0.weight": None, "0.bias": None},
        {"0.scale": torch.zeros(1)},
    ],
)
def test_bad_state_dicts_are_refused_as_torch_does(change: dict[str, torch.Tensor | None]) -> None:
    plain, mixed = nn.Sequential(nn.Linear(7, 8)), nn.Sequential(nn.Linear(7, 8))
    replace_linears(mixed)
    state = {k: v for k, v in {**plain.state_dict(), **change}.items() if v is not None}
    with pytest.raises(RuntimeError) as wanted:
        plain.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict") as got:
        mixed.load_state_dict(state)
    assert str(got.value) == str(wanted.value)
    if "size mismatch" not in str(wanted.value):
        keys = mixed.load_state_dict(state, strict=False)
        assert keys == plain.load_state_dict(state, strict=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": -0.1}, "ratio from 0 to 1, got -0.1"),
        ({"ratio": 1.01}, "ratio from 0 to 1, got 1.01"),
        ({"ratio": float("nan")}, "ratio from 0 to 1, got nan"),
        ({"ratio": "a"}, "ratio from 0 to 1, got 'a'"),
        ({"remote": "disk"}, "host or peer:N .* 'disk'"),
        ({"remote": "peer"}, "host or peer:N .* 'peer'"),
        ({"device": "meta"}, "CPU or a CUDA GPU, got meta"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitKGEMM.from_linear(make_linear(16, 8), **options)


def test_bad_shapes_dtypes_and_inputs() -> None:
    with pytest.raises(ValueError, match=r"at least one feature .* got 0 and 8"):
        SplitKGEMM(0, 8)
    with pytest.raises(ValueError, match=r"floating-point .*int8"):
        SplitKGEMM(8, 8, dtype=torch.int8)
    module = SplitKGEMM.from_linear(make_linear(16, 8))
    wanted = r"expected x as \[\.\.\., 16\] of torch\.float32 on cpu, got "
    for x, got in (
        (torch.zeros(2, 15), r"\[2, 15\] of torch.float32 on cpu"),
        (torch.tensor(1.0), r"\[\] of torch.float32 on cpu"),
        (torch.zeros(2, 16).half(), r"\[2, 16\] of torch.float16 on cpu"),
        (torch.zeros(2, 16, device="meta"), r"\[2, 16\] of torch.float32 on meta"),
    ):
        with pytest.raises(ValueError, match=wanted + got):
            module(x)


def test_closing() -> None:
    module = SplitKGEMM.from_linear(make_linear(16, 8))
    tiers = dict(module._tiers)
    module.close()
    assert all(tier._block.tensor.numel() == 0 for tier in tiers.values())
    for use in (lambda: module(torch.zeros(1, 16)), module.state_dict, lambda: module.weight):
        with pytest.raises(ValueError, match="closed"):
            use()
    module.close()


def test_neither_copied_nor_pickled(tmp_path: Path) -> None:
    model = nn.Sequential(SplitKGEMM.from_linear(make_linear(16, 8)))
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        torch.save(model, tmp_path / "model.pt")


def test_what_is_replaced() -> None:
    tied, untied = tiny_llama(tied=True), tiny_llama()
    with torch.inference_mode():
        ids = torch.arange(12).view(2, 6)
        before = tied(ids).logits
        names = replace_linears(tied, ratio=0.5)
        assert len(names) == 14 and all("layers" in name for name in names)
        torch.testing.assert_close(tied(ids).logits, before, rtol=1e-4, atol=1e-4)
    assert type(tied.lm_head) is nn.Linear
    assert "lm_head" in replace_linears(untied) and isinstance(untied.lm_head, SplitKGEMM)
    attention = nn.MultiheadAttention(16, 2)  # reads the weight of its out_proj itself
    assert replace_linears(attention) == {}


def test_training_and_attributes_are_carried_over() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).eval()
    model[1].train()
    model[0].scale = 3
    replace_linears(model)
    assert [module.training for module in model] == [False, True]
    assert model[0].scale == 3 and not hasattr(model[1], "scale")
    model.train()
    assert SplitKGEMM.from_linear(nn.Linear(16, 8).eval()).training is False


def test_linears_that_somebody_has_changed_are_kept_and_named() -> None:
    def twice(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return 2 * output

    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)))
    model[0].register_forward_hook(twice)
    model[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model[2].register_full_backward_hook(lambda *_: None)
    model[3].register_state_dict_post_hook(lambda *_: None)
    model[4]._old_forward = model[4].forward  # as accelerate does
    model[4].forward = lambda x: 3 * model[4]._old_forward(x)
    model[5].register_buffer("scale", torch.ones(6))
    model[6].lora = nn.Linear(6, 6)
    torch.nn.utils.weight_norm(model[7])
    model[8].ratio = 2
    x = torch.randn(5, 6)
    wanted = model(x)
    with pytest.warns(UserWarning, match="keeps 9 nn.Linear: ") as warned:
        replaced = replace_linears(nn.ModuleDict({"a": model, "b": nn.Linear(6, 6)}))
    assert list(replaced) == ["a.6.lora", "b"], "an adapter inside a Linear is an nn.Linear, too"
    said = str(warned[0].message)
    for number in (0, 1, 2, 3, 7):
        assert f"a.{number} (has hooks)" in said
    assert "a.4 (has its own forward)" in said and "a.8 (has its own ratio)" in said
    for number in (5, 6):
        assert f"a.{number} (has further parameters, buffers or modules)" in said
    assert all(type(linear) is nn.Linear for linear in model)
    assert torch.equal(model(x), wanted)
    known = set(vars(SplitKGEMM(8, 8))) - set(vars(nn.Linear(8, 8)))
    assert known == set(replace_module._OF_TIERS)


def test_a_linear_alone_cannot_be_replaced() -> None:
    with pytest.raises(ValueError, match=r"use SplitKGEMM\.from_linear\(linear, \.\.\.\)"):
        replace_linears(nn.Linear(16, 8))
    with pytest.raises(ValueError, match=r"expected a plan of dakrun\.plan\.make_plan, got 'x'"):
        replace_linears(nn.Sequential(nn.Linear(16, 8)), plan="x")  # type: ignore[arg-type]


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """CPU weights packed as on an H200, stand-ins for its kernels; which, and rows, of launches."""
    launched: list[tuple[str, int]] = []

    def stand_in(by: str) -> Callable[..., None]:
        def launch(
            x: torch.Tensor, weight: TieredMatrix, config: Any, out: torch.Tensor, **options: Any
        ) -> None:
            assert x.data_ptr() % 16 == 0 == out.data_ptr() % 16
            assert x.is_contiguous() and out.is_contiguous() and options["pdl"]
            launched.append((by, len(x)))
            out.copy_(F.linear(x, weight.dense(), options["bias"]))

        return launch

    def kernel_format(
        like: torch.Tensor, cols: int, layout: Quantised | None = None
    ) -> WeightFormat | None:
        return PACKED16 if like.dtype in DTYPES and cols % 8 == 0 else None

    monkeypatch.setattr("dakrun.kernels.gemm.splitk.splitk_gemm", stand_in("splitk"))
    monkeypatch.setattr("dakrun.kernels.gemm.tiled.tiled_gemm", stand_in("tiled"))
    # A CPU has neither kernels nor SMs.
    monkeypatch.setattr("dakrun.nn.gemm.products", lambda device: products.Products(device, H200))
    for module in ("gemm", "tiers"):
        monkeypatch.setattr(f"dakrun.nn.{module}.kernel_format", kernel_format)
    hold_to(H200, monkeypatch)
    return launched


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("cols", "rows"), [(136, 3), (512, 9000), (1096, 331)])
def test_packed_weights(
    kernels_on_the_cpu: list[tuple[str, int]], ratio: float, cols: int, rows: int
) -> None:
    linear = make_linear(cols, rows, dtype=torch.bfloat16)
    module = SplitKGEMM.from_linear(linear, ratio=ratio, access=ACCESS, pdl=True)
    assert module.weight.for_kernels
    row_blocks = row_block_count(rows)
    remote = int(ratio * row_blocks + 0.5)
    assert [part.split.row_blocks for part in module.weight.parts] == [row_blocks - remote, remote]
    assert module.ratio == pytest.approx(remote / row_blocks)
    sizes = [tier.capacity for tier in module._tiers.values()]
    row_block = PACKED16.row_block_bytes(cols)
    assert sizes == [(row_blocks - remote) * row_block, remote * row_block]
    assert_same_state(module, linear)
    other = make_linear(cols, rows)
    linear.load_state_dict(other.state_dict())
    other.weight = nn.Parameter(other.weight.t().contiguous().t())  # rows do not lie side by side
    module.load_state_dict(other.state_dict())
    assert_same_state(module, linear)
    flat = torch.randn(200 * cols + 1, dtype=torch.bfloat16)
    for x in (flat[1 : 1 + cols], flat[1:].view(40, 5, cols), torch.empty(3, 0, cols).bfloat16()):
        torch.testing.assert_close(module(x), linear(x), rtol=2e-2, atol=2e-2)
    assert kernels_on_the_cpu == [("splitk", 1), ("tiled", 200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_fast_paths_of_torch_are_not_taken(
    dtype: torch.dtype, kernels_on_the_cpu: list[tuple[str, int]]
) -> None:
    """Torch's encoders read the weights of their Linears in eval, where nothing forbids it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dtype=dtype)
    plain = nn.TransformerEncoder(layer, 2).eval()
    mixed = copy.deepcopy(plain)
    replaced = replace_linears(mixed, ratio=0.5, access=ACCESS, pdl=True)
    assert list(replaced) == [f"layers.{n}.linear{m}" for n in (0, 1) for m in (1, 2)]
    x = torch.randn(2, 7, 64, dtype=dtype)
    padding = torch.tensor([7 * [False], 4 * [False] + 3 * [True]])
    for mask in (None, padding):
        got, wanted = mixed(x, src_key_padding_mask=mask), plain(x, src_key_padding_mask=mask)
        if mask is not None:  # of padding the fast path gives zeros
            got, wanted = got[~mask], wanted[~mask]
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert bool(kernels_on_the_cpu) == (dtype == torch.bfloat16)
    weight = replaced["layers.0.linear1"].weight
    assert (weight.device, weight.dtype, weight.shape) == (x.device, dtype, (128, 64))
    assert not weight.requires_grad
    with pytest.raises(TypeError, match="linear"):
        F.linear(x, weight)


def test_how_the_remote_tier_is_read(kernels_on_the_cpu: list[tuple[str, int]]) -> None:
    linear = make_linear(512, 512, dtype=torch.float16)
    module = SplitKGEMM.from_linear(linear, profile="h200-nvlink-peer", remote="peer:1")
    assert module._access.sms and module._access.window_bytes
    assert SplitKGEMM.from_linear(linear, access=TierAccess())._access == TierAccess()
    with pytest.raises(UsageError, match=r"h200-pcie5 .*'peer:1'"):
        SplitKGEMM.from_linear(linear, profile="h200-pcie5", remote="peer:1")


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("cols", "rows"), [(8, 8), (1096, 331), (2048, 4096), (4096, 1000)])
def test_at_every_ratio_the_error_is_that_of_cublas_and_bits_are_the_same(
    dtype: torch.dtype, cols: int, rows: int
) -> None:
    linear = make_linear(cols, rows, dtype=dtype).cuda()
    modules = [
        SplitKGEMM.from_linear(linear, ratio=ratio, access=ACCESS) for ratio in (*RATIOS, 0.5)
    ]
    for module in modules:
        assert module.weight.for_kernels
        assert_same_state(module, linear)
    for n in (1, 3, 7, 8, 13, 33, 64, 65, 200, 1000):
        x = torch.randn(n, cols, device="cuda", dtype=dtype)
        exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
        allowed = 2 * error(linear(x), exact) + 1e-6
        results = []
        for module in modules:
            torch.full((n, rows), torch.nan, device="cuda", dtype=dtype)  # where y will lie
            results.append(module(x))
            assert error(results[-1], exact) <= allowed
            assert torch.equal(results[-1], results[0])


@pytest.mark.gpu
def test_inputs_of_any_shape_and_place() -> None:
    linear = make_linear(1096, 331, dtype=torch.float16).cuda()
    module = SplitKGEMM.from_linear(linear, access=ACCESS)
    flat = torch.randn(10 * 1096 + 1, device="cuda", dtype=torch.float16)
    rows = flat[1:].view(10, 1096)
    y = module(rows.clone())
    assert torch.equal(module(rows), y), "not aligned"
    assert torch.equal(module(rows.view(2, 5, 1096)), y.view(2, 5, 331))
    assert torch.equal(module(rows.t().contiguous().t()), y), "not contiguous"
    assert torch.equal(module(rows[3]), module(rows[3:4])[0])
    assert module(rows[:0].view(0, 4, 1096)).shape == (0, 4, 331)
    with pytest.raises(ValueError, match=r"of torch\.float16 on cuda:0, got .* on cpu"):
        module(rows.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("n", [1, 7, 65, 600])
def test_a_captured_graph_gives_the_same_bits(n: int, pdl: bool) -> None:
    torch.manual_seed(n)
    first, second = (
        SplitKGEMM.from_linear(
            make_linear(cols, rows, dtype=torch.bfloat16), ratio=ratio, access=ACCESS,
            pdl=pdl, device="cuda",
        )
        for cols, rows, ratio in ((1024, 3000, 0.1), (3000, 1024, 0.4))
    )  # fmt: skip

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = second(first(x))
            x = x / x.norm()
        return x

    static = torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16)
    others = [torch.randn_like(static) for _ in range(5)]
    eager = [run(other) for other in others]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(static)
    for other, wanted in zip(others, eager, strict=True):
        static.copy_(other)
        graph.replay()
        assert torch.equal(result, wanted)
    other = make_linear(1024, 3000, dtype=torch.bfloat16)
    nn.init.normal_(other.weight)
    first.load_state_dict(other.state_dict())
    graph.replay()
    assert torch.equal(result, run(static)), "the graph sees what was loaded"


@pytest.mark.gpu
@pytest.mark.parametrize(("cols", "dtype"), [(1024, torch.float32), (1100, torch.float16)])
@pytest.mark.parametrize("ratio", RATIOS)
def test_what_the_kernel_lacks_falls_back(cols: int, dtype: torch.dtype, ratio: float) -> None:
    linear = make_linear(cols, 200, dtype=dtype).cuda()
    module = SplitKGEMM.from_linear(linear, ratio=ratio)
    assert not module.weight.for_kernels
    assert_same_state(module, linear)
    x = torch.randn(5, cols, device="cuda", dtype=dtype)
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    assert error(module(x), exact) < (1e-2 if dtype == torch.float16 else 1e-5)


@pytest.mark.gpu
def test_the_memory_is_given_back() -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime
    linear = make_linear(4096, 8192, dtype=torch.float16)
    for close in (True, False):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        module = SplitKGEMM.from_linear(linear, ratio=0.5, access=ACCESS, device="cuda")
        address = module.weight.parts[1].arrays[0].data_ptr()
        assert runtime.pointerGetAttributes(address).type == 1, "page-locked"
        assert torch.cuda.memory_allocated() >= before + linear.weight.nbytes // 2
        if close:
            module.close()
        else:
            del module
        assert runtime.pointerGetAttributes(address).type != 1
        assert torch.cuda.memory_allocated() < before + linear.weight.nbytes // 4
    with pytest.raises(CannotRun, match="is the GPU that runs"):
        SplitKGEMM.from_linear(linear, remote="peer:0", access=ACCESS, device="cuda:0")


@pytest.mark.gpu
def test_a_peer_as_the_remote_tier() -> None:
    peer = readable_peer()
    linear = make_linear(1096, 331, dtype=torch.float16).cuda()
    remote = f"peer:{peer}"
    module = SplitKGEMM.from_linear(
        linear, ratio=0.5, remote=remote, access=TierAccess(32, 1 << 20)
    )
    assert module.weight.parts[1].arrays[0].device.index == peer
    local = SplitKGEMM.from_linear(linear, ratio=0, access=ACCESS)
    x = torch.randn(9, 1096, device="cuda", dtype=torch.float16)
    assert torch.equal(module(x), local(x))
    assert_same_state(module, linear)


@pytest.mark.gpu
def test_a_transformers_model_in_a_graph() -> None:
    plain = tiny_llama().half().cuda()
    exact = copy.deepcopy(plain).double()
    model = copy.deepcopy(plain)
    replaced = replace_linears(model, ratio=0.3, access=ACCESS)
    assert len(replaced) == 15
    prompt = torch.randint(4, 331, (2, 40), device="cuda")  # 80 rows: the tiled GEMM's
    with torch.inference_mode():
        wanted = exact(prompt).logits
        assert error(model(prompt).logits, wanted) <= 2 * error(plain(prompt).logits, wanted)

        def decode(step: Any, count: int) -> list[list[int]]:
            """Tokens of `count` steps after the prompt's; `step` makes a step of a cache."""
            cache = StaticCache(model.config, max_cache_len=64)
            logits = model(prompt, past_key_values=cache).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            advance = step(cache, token)
            tokens = [token.clone()]
            for _ in range(count):
                advance()
                tokens.append(token.clone())
            return torch.cat(tokens, dim=1).tolist()

        def eager(cache: StaticCache, token: torch.Tensor) -> Any:
            def advance() -> None:
                logits = model(token, past_key_values=cache).logits
                token.copy_(logits[:, -1].argmax(-1, keepdim=True))

            return advance

        def captured(cache: StaticCache, token: torch.Tensor) -> Any:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                eager(cache, token)()
            return graph.replay

        wanted_tokens = decode(eager, 16)  # first, since it compiles what the graph will hold
        assert decode(captured, 16) == wanted_tokens


@pytest.mark.parametrize("module", ["gemm", "experts", "attention", "kv_cache"])
def test_examples_of_classes(module: str) -> None:
    found = doctest.testmod(import_module(f"dakrun.nn.{module}"))
    assert found.attempted and not found.failed


@pytest.mark.gpu
def test_the_example_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = doctest.script_from_examples(dakrun.nn.__doc__)
    assert example.count('from_pretrained("path/to/model"') == 2
    name = "path/to/model"
    folder = make_tokenizer_files(tmp_path / name)
    tiny_llama().half().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "dakrun.nn", "exec"), names)
    model, prompt = names["model"], names["prompt"]
    assert isinstance(model.lm_head, SplitKGEMM)
    assert len(names["tokens"]) == 32
    with torch.inference_mode():
        cache, ids = StaticCache(model.config, max_cache_len=128), prompt
        for token in names["tokens"]:
            logits = model(ids, past_key_values=cache).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            assert torch.equal(ids, token)
