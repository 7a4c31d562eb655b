"""`dakrun bench --kernel prompt-attention`, and --rival flashinfer with a stand-in."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benched import (
    HEAD,
    PROFILE,
    TINY,
    check_command,
    malformed,
    on_the_cpu,
    refused,
    run,
    without_a_gpu,
)
from cards import H200

from dakrun.hardware import LOCAL
from dakrun.kernels.attention import prompt
from dakrun.lab.bench.kernel import measure_kernel
from dakrun.lab.bench.kernel_sweep import (
    DEFAULT_PROMPTS,
    DEFAULT_SLOTS,
    KernelSweep,
    kernel_row,
    parse_slots,
)
from dakrun.lab.bench.run import SWEEPS
from dakrun.lab.cases import Case, Prompts, Slots, buffer_bytes
from dakrun.lab.chains import CHAINS, PromptChains
from dakrun.lab.memory import Room
from dakrun.lab.output import Record
from dakrun.launches import TierAccess

sdpa = torch.nn.functional.scaled_dot_product_attention


def sweep(kernel: str = "prompt-attention", **asked: Any) -> KernelSweep:
    """What the command line's defaults and `asked` ask for."""
    defaults = {
        "cases": (), "head_dim": "128", "ratios": ("0",), "remote": "host", "dtype": "float16",
        "rival": None,
    }  # fmt: skip
    found = SWEEPS[kernel](**{**defaults, **asked})
    assert isinstance(found, KernelSweep)
    return found


def case(units: tuple[int, ...] = (3,), length: int = 100) -> Case:
    prompts = Prompts(3, 8, 2, length, head_dim=64)
    return Case(operand=prompts, dtype="float16", requested=0.0, units=units, launches=5)


def test_the_articles_cases() -> None:
    """All that its tables have: by batch, by length, and of prompts."""
    decode = {(of.batch, of.length) for of in DEFAULT_SLOTS if (of.heads, of.kv_heads) == (32, 8)}
    assert decode >= {(batch, 2048) for batch in (1, 4, 16, 64, 128, 256)}
    assert decode >= {(64, 256 << i) for i in range(6)}
    every = itertools.product((1, 4, 16), (512, 1024, 2048, 4096))
    assert sweep().operands == tuple(Prompts(batch, 32, 8, n) for batch, n in every)
    assert sweep().operands == DEFAULT_PROMPTS


def test_flops_are_the_articles() -> None:
    (largest,) = sweep(cases=("4:32/8:4096",)).operands
    assert isinstance(largest, Prompts)
    # Published: 0.995 ms and 552 TFLOPS.
    assert largest.flops == 4 * 4 * 4096**2 / 2 * 32 * 128
    assert largest.flops / 0.995e-3 == pytest.approx(552e12, rel=2e-3)
    assert largest.op("float16").flops == largest.flops


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("4:8/2:1-100", "prompts have one length", "--case 64:32/8:2048"),
        ("4:130/2:100", "130 query heads for 2 KV heads", "1 to 64 for each"),
    ],
)
def test_malformed_prompts(text: str, said: str, hint: str) -> None:
    malformed(lambda text: parse_slots(text, Prompts), text, said, hint)


@pytest.mark.parametrize("units", [(3,), (2, 1)])
def test_every_prompt_attends_to_itself(
    units: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch reads keys and values of its own, wherever they lie, by tiles of all rows."""
    read = []

    def attend(q: torch.Tensor, tables: Any, work: Any, out: torch.Tensor, **options: Any) -> None:
        prompt._check_operands(q, tables, work, out)
        assert options == {"scale": 64**-0.5, "pdl": True} and q.shape == (300, 8, 64)
        tiles = [prompt.PromptTile(*tile) for tile in work.tiles.tolist()]
        rows = sorted((t.slot, t.row + i, t.position + i) for t in tiles for i in range(t.queries))
        assert rows == [(n // 100, n, n % 100) for n in range(300)]
        read.append(tables.addresses[:, 0].tolist())

    on_the_cpu(monkeypatch)
    monkeypatch.setattr("dakrun.lab.chains.attention.prompt_attn", attend)  # needs a GPU
    some = case(units)
    sizes = dict(zip((LOCAL, "host"), buffer_bytes([some], 256), strict=False))
    with Room(torch.device("cpu")) as room:
        chains = PromptChains(room.at_least(sizes), torch.float16, H200, replays=3)
        assert chains.kernel(some, [TierAccess()] * len(units)) == ([1e-2 / 5] * 3, "prompt")
        size = some.operand.unit_bytes("float16")
        held = [
            range(buffer.data_ptr(), buffer.data_ptr() + 5 * nbytes, size)
            for buffer, nbytes in zip(room.buffers.values(), some.held_bytes, strict=True)
        ]
        assert sorted(itertools.chain(*read)) == sorted(itertools.chain(*held))


def test_torch_has_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def spy(q: torch.Tensor, *parts: torch.Tensor, **options: Any) -> torch.Tensor:
        shapes.append((q.shape, *(part.shape for part in parts)))
        assert options == {"is_causal": True, "enable_gqa": True}
        return sdpa(q, *parts, **options)

    on_the_cpu(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with_buffer(case()).baseline(case())
    assert shapes == [((3, 8, 100, 64), (3, 2, 100, 64), (3, 2, 100, 64))] * 5


def with_buffer(some: Case) -> Any:
    """Chains over a buffer for `some`, filled."""
    buffer = torch.zeros(buffer_bytes([some], 256)[0], dtype=torch.uint8)
    chains = CHAINS[type(some.operand)]({LOCAL: buffer}, torch.float16, H200, replays=3)
    chains.fill(some.operand)
    return chains


class Wrapper:
    """A stand-in for FlashInfer's wrappers: attention in torch, of what plan() says."""

    lengths: list[int]  # positions of each slot that were read
    addresses: list[int]  # of each launch's keys

    def __init__(self, workspace: torch.Tensor, layout: str, **options: bool) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        assert options in ({}, {"use_tensor_cores": True})
        self._plan: tuple[Any, ...] = ()

    def plan(self, *args: Any, **options: Any) -> None:
        types = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
        assert options == types | ({"causal": True} if len(args) == 5 else {})
        self._plan = args

    def run(self, q: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        Wrapper.addresses.append(parts[0].data_ptr())
        return self._decode(q, *parts) if len(parts) == 1 else self._prefill(q, *parts)

    def _decode(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        ends, indices, filled, heads, kv_heads, dim, page = self._plan
        assert cache.shape[1:] == (2, page, kv_heads, dim) and q.shape[1:] == (heads, dim)
        found = []
        for i, row in enumerate(q):
            some = cache[indices[ends[i] : ends[i + 1]].long()]
            length = page * (len(some) - 1) + int(filled[i])
            keys, values = (some[:, j].flatten(0, 1)[:length].transpose(0, 1) for j in (0, 1))
            found.append(sdpa(row[:, None], keys, values, enable_gqa=True)[:, 0])
            Wrapper.lengths.append(length)
        return torch.stack(found)

    def _prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ends, kv_ends, heads, kv_heads, dim = self._plan
        assert torch.equal(ends, kv_ends) and q.shape == (ends[-1], heads, dim)
        assert keys.shape == values.shape == (ends[-1], kv_heads, dim)
        Wrapper.lengths += ends.diff().tolist()
        return q


@pytest.fixture
def rival(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper")
    module = SimpleNamespace(__spec__=object(), **dict.fromkeys(names, Wrapper))
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    for name in ("lengths", "addresses"):
        monkeypatch.setattr(Wrapper, name, [], raising=False)


@pytest.mark.parametrize(
    "operand", [Slots(3, 8, 2, 100, 7), Slots(2, 4, 4, 64), Prompts(3, 8, 2, 50)]
)
def test_flashinfer_reads_all_positions(rival: None, operand: Slots) -> None:
    some = Case(operand=operand, dtype="float16", requested=0, units=(operand.batch,), launches=4)
    assert with_buffer(some).rival(some) == [1e-2 / 4] * 3
    assert Wrapper.lengths == 4 * list(operand.lengths)
    assert len(set(Wrapper.addresses)) == 4, "each launch reads keys of its own"


def test_a_sweep_without_a_gpu(rival: None, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(
        "dakrun.lab.chains.attention.prompt_attn", lambda *_, **__: None
    )  # needs a GPU
    found = measure_kernel(
        sweep(cases=("2:4/2:70", "1:4/4:64"), rival="flashinfer"), PROFILE, effort=TINY,
        command="it", progress=(said := list[str]()).append,
    )  # fmt: skip
    titles = [column.title for column in found.columns]
    assert "TFLOPS" in titles and "FlashInfer us" in titles and "share of ceiling" not in titles
    for row, text in zip(found.rows, said[1:], strict=True):
        launch_s = 1e-2 / row["launches"]
        assert row["time_s"] == row["rival_s"] == row["sdpa_s"] == launch_s
        assert row["flops_per_s"] == 2 * row["batch"] * row["length"] ** 2 * 4 * 128 / launch_s
        assert text.endswith("TFLOPS")


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    some = case()
    row = kernel_row(some, (1e-6,) * 3, "prompt", bound_s=1e-7, predicted_s=1e-6, baseline_s=2e-6)
    wanted = sweep(cases=("3:8/2:100",), head_dim="64", ratios=("0.5",))
    head = HEAD | {"command": "dakrun bench --kernel prompt-attention"}
    record = Record(head=head, columns=wanted.columns, rows=(row,))
    args = ("--case", "3:8/2:100", "--head-dim", "64", "--ratio", "0.5")
    check_command("prompt-attention", args, wanted, record, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kernel", "name", "code", "said", "hint"),
    [
        ("attention", "flashinfer", 3, "FlashInfer, which is not installed", "dakrun[flashinfer]"),
        ("prompt-attention", "flashinfer", 3, "which is not installed", "dakrun[flashinfer]"),
        ("attention", "prefetch", 2, "no rival of --kernel attention", "name any of flashinfer"),
        ("gemm", "flashinfer", 2, "--rival is an option of", "leave it out"),
    ],
)
def test_rivals_of_kernels(
    kernel: str, name: str, code: int, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(run("--kernel", kernel, "--rival", name), code, said, hint)


def test_flashinfer_is_no_rival_of_models() -> None:
    said = "--rival flashinfer is no rival of whole models"
    refused(run("--model", "opt-125m", "--rival", "flashinfer"), 2, said, "transformers, prefetch")


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("length", [100, 512])
def test_prompts_on_a_gpu(length: int) -> None:
    """Rows of a tiny sweep; torch's result and the kernel's for the same operands."""
    found = measure_kernel(
        sweep(cases=(f"3:8/2:{length}", "1:32/8:700"), ratios=("0", "1"), dtype="bfloat16"),
        PROFILE, effort=TINY, command="it", progress=lambda text: None,
    )  # fmt: skip
    for row in found.rows:
        assert row["flops_per_s"] > 0 and row["sdpa_s"] > 0 and row["predicted_s"] > 0
