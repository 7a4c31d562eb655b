"""`dakrun bench --kernel attention`: sweeps, cases, rows and errors; and a tiny sweep, on a GPU and
with kernels that stand in for a GPU's. test_bench_gemm.py tests what all kernels share.
"""

import ctypes
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benched import (
    HEAD,
    PROFILE,
    TINY,
    check_command,
    check_measured,
    malformed,
    on_the_cpu,
    refused,
    run,
    without_a_gpu,
)
from cards import H200
from hypothesis import given
from hypothesis import strategies as st

from dakrun.cli import main
from dakrun.cli.bench import OPTIONS_OF
from dakrun.config import Workload
from dakrun.geometry import HEAD_DIMS
from dakrun.hardware import LOCAL
from dakrun.kernels.attention import config as attention_heuristics
from dakrun.kernels.attention import kv_blocks
from dakrun.kernels.attention import splitk as kernel
from dakrun.lab.bench.kernel import measure_kernel
from dakrun.lab.bench.kernel_sweep import (
    DEFAULT_SLOTS,
    KernelSweep,
    attention_sweep,
    kernel_row,
    parse_slots,
)
from dakrun.lab.cases import TURNING_POINT, Case, Slots, buffer_bytes, forecast
from dakrun.lab.ceilings import FULL, MIB
from dakrun.lab.chains import AttentionChains
from dakrun.lab.memory import Room
from dakrun.lab.output import Record, as_text
from dakrun.launches import TierAccess
from dakrun.models import known_model
from dakrun.plan import Policy, make_plan


def sweep(**asked: Any) -> KernelSweep:
    """What the command line's defaults and `asked` ask for."""
    defaults = {
        "cases": (), "head_dim": "128", "ratios": ("0",), "remote": "host", "dtype": "float16",
    }  # fmt: skip
    return attention_sweep(**{**defaults, **asked})


def case(
    text: str = "4:8/2:100",
    units: tuple[int, ...] = (3, 1),
    *,
    head_dim: int = 64,
    dtype: Any = "float16",
) -> Case:
    slots = replace(parse_slots(text), head_dim=head_dim)
    return Case(operand=slots, dtype=dtype, requested=0.25, units=units, launches=5)


def record() -> Record:
    found = kernel_row(
        case(), (1e-6, 2e-6, 3e-6), "splitk", bound_s=1.5e-6, predicted_s=1.9e-6, baseline_s=5e-6
    )
    head = HEAD | {"command": "dakrun bench --kernel attention"}
    return Record(head=head, columns=sweep().columns, rows=(found,))


@pytest.mark.parametrize("text", ["64:32/8:2048", " 64:32/8:2048 ", "064:32/08:2048"])
def test_slots(text: str) -> None:
    assert parse_slots(text) == Slots(64, 32, 8, 2048)
    assert str(parse_slots(text)) == "64:32/8:2048"
    assert parse_slots(text).lengths == (2048,) * 64


def test_slots_of_different_lengths() -> None:
    some = parse_slots("64:32/8:1-8192")
    assert some == Slots(64, 32, 8, 8192, 1) and str(some) == "64:32/8:1-8192"
    assert len(some.lengths) == 64 and 1 <= min(some.lengths) < max(some.lengths) <= 8192
    assert some.lengths == parse_slots("64:32/8:1-8192").lengths, "the same each time"
    assert parse_slots("3:8/8:7-7").lengths == (7, 7, 7)


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        *((text, "is not a case", "--case 64:32/8:2048")
          for text in ("", "64", "64:32:2048", "64:32/8", "64:32/8:", "-1:8/8:64", "1:8/8:6.4",
                       "1:8/8:64:64", "٣:8/8:64", "1x8/8x64", "1:8/8:-64", "1:8/8:1-2-3")),
        *((text, f"a case of {text} is empty", "at least 1")
          for text in ("0:8/8:64", "1:0/8:64", "1:8/0:64", "1:8/8:0", "1:8/8:0-9")),
        ("1:8/8:9-8", "shortest", "1-8192"),
        ("1:9/2:64", "9 query heads for 2 KV heads", "1 to 16 for each"),
        ("1:2/4:64", "2 query heads for 4 KV heads", "1 to 16 for each"),
        ("1:34/2:64", "34 query heads for 2 KV heads", "1 to 16 for each"),
    ],
)  # fmt: skip
def test_malformed_slots(text: str, said: str, hint: str) -> None:
    malformed(parse_slots, text, said, hint)


def test_head_sizes_of_the_kernel_are_options() -> None:
    for dim in HEAD_DIMS:
        assert {of.head_dim for of in sweep(head_dim=str(dim)).operands} == {dim}
        assert f"{dim}" in run("--help").stdout


def test_a_sweep() -> None:
    wanted = (
        "8:56/56:1056 128:56/56:544 512:32/32:512 64:32/8:2048 64:32/8:8192 16:64/8:8192 "
        "1:32/8:131072 2:64/8:65536 512:32/32:64 8:56/56:64 1:32/8:2048 4:32/8:2048 16:32/8:2048 "
        "128:32/8:2048 256:32/8:2048 64:32/8:256 64:32/8:512 64:32/8:1024 64:32/8:4096"
    )
    assert " ".join(map(str, sweep().operands)) == wanted
    some = sweep(cases=("2:8/8:64", "1:8/8:64", "02:8/8:64"), ratios=("0", "0.0", "0.5"))
    assert some.operands == (Slots(2, 8, 8, 64), Slots(1, 8, 8, 64)) and some.ratios == (0.0, 0.5)


@given(
    st.integers(1, 64), st.integers(1, 8), st.integers(1, 5000),
    st.sampled_from(HEAD_DIMS),
)  # fmt: skip
def test_slots_have_room_in_whole_blocks(batch: int, heads: int, length: int, dim: int) -> None:
    slots = Slots(batch, heads, heads, length, head_dim=dim)
    shape = kv_blocks.KVShape(heads, dim, length)
    held = heads * ((length - 1) // 64 + 1) * 2 * attention_heuristics.stage_bytes(shape)
    assert slots.unit_bytes("float16") == slots.unit_bytes("bfloat16") == held
    assert held == shape.slot_bytes


def test_bytes_of_a_case() -> None:
    # 2 KV heads, keys and values of 100 positions of 64 dimensions of 2 bytes, in 2 blocks of 64.
    read, size = (2 * 2 * count * 64 * 2 for count in (100, 128))
    some = case()
    assert some.tier_bytes == (3 * read, read) and some.read_bytes == 4 * read
    assert some.ratio == 0.25
    assert buffer_bytes([some, case(units=(0, 4))], 256) == [5 * (4 * size + 256), 5 * 4 * size]


def test_bytes_of_slots_of_different_lengths() -> None:
    slots = parse_slots("64:32/8:1-8192")
    (some,) = sweep(cases=(str(slots),), ratios=("0.25",)).cases(0.0, TINY, tiers=2)
    assert some.units == (48, 16) and some.held_bytes == (48 * 2**25, 16 * 2**25)
    sizes = [length * 8 * 2 * 128 * 2 for length in slots.lengths]
    assert some.tier_bytes == (sum(sizes[:48]), sum(sizes[48:]))
    assert some.launches == max(4, 64 * MIB // sum(sizes) + 1)
    assert buffer_bytes([some], 256) == [some.launches * (2**31 + 256), some.launches * 2**29]
    op = some.operand.op("float16")
    assert op.read_bytes == sum(slots.lengths) * 8 * 2 * 128 * 2 and op.resident_bytes == 2**31


@pytest.mark.parametrize("slots", DEFAULT_SLOTS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_sets_of_a_case(slots: Slots, dim: int) -> None:
    wanted = sweep(cases=(str(slots),), head_dim=str(dim))
    (some,) = wanted.cases(0.0, FULL, tiers=1)
    assert some.launches >= 4 and some.launches * some.read_bytes > 2 * 2**30
    assert some.launches == 4 or (some.launches - 1) * some.read_bytes <= 2 * 2**30
    assert some.units == (slots.batch,) and FULL.replays == 7


def test_slots_per_tier() -> None:
    wanted = sweep(cases=("10:8/8:64",), ratios=("0", "0.25", TURNING_POINT, "1"))
    found = wanted.cases(0.19, TINY, tiers=2)
    assert [some.units for some in found] == [(10, 0), (7, 3), (9, 1), (0, 10)]


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("model", ["opt-30b", "llama-3-8b"])
def test_predictions_are_the_plans(model: str, ratio: float) -> None:
    config = known_model(model)
    assert config is not None
    workload = Workload(batch_size=8, prompt_len=1000, new_tokens=48, max_model_len=1048)
    policy = Policy(
        offload_ratio=0.0, kv_offload_ratio=ratio, strategy="uniform", transport="direct"
    )
    op = make_plan(config, workload, PROFILE, policy).op("attention")
    (counts,) = set(op.placement)
    heads = f"{config.num_heads}/{config.num_kv_heads}"
    dtype: Any = config.dtype
    same = case(f"8:{heads}:1024", tuple(counts), head_dim=config.head_dim, dtype=dtype)
    found = forecast(same, PROFILE, ("host",))
    assert found.seconds == pytest.approx(op.predicted_s[0], rel=1e-9)
    assert found.sms == op.sms


def test_a_row() -> None:
    (row,) = record().rows
    assert (row["case"], row["batch"], row["heads"], row["kv_heads"]) == ("4:8/2:100", 4, 8, 2)
    assert row["time_s"] == 2e-6 and row["bytes_per_s"] == case().read_bytes / 2e-6
    assert row["kv_bytes"] == case().read_bytes and row["ratio"] == 0.25
    ratios = row["bound_over_time"], row["speedup"], row["spread"]
    assert ratios == pytest.approx((0.75, 2.5, 0.5))
    assert {column.key for column in record().columns} <= row.keys()


def test_forms() -> None:
    *_, titles, _, cells = as_text(record(), "md").rstrip().splitlines()
    assert [text.strip() for text in titles.strip("|").split("|")] == [
        *(
            "case",
            "remote",
            "time us",
            "spread",
            "GB/s",
            "share of ceiling",
            "predicted us",
            "SDPA us",
        ),
        "speedup",
    ]
    assert cells.startswith("| 4:8/2:100 | 25.00% | 2.00 | 50.0% | ")
    (row,) = json.loads(as_text(record(), "json"))["rows"]
    assert row["sdpa_s"] == 5e-6 and row["head_dim"] == 64
    assert "4:8/2:100" in as_text(record(), "csv")


@pytest.mark.parametrize(
    ("args", "code", "said", "hint"),
    [
        (("--case", "64"), 2, "not a case", "--case 64:32/8:2048"),
        (("--case", "1:9/2:64"), 2, "9 query heads for 2 KV heads", "1 to 16"),
        (("--ratio", "2"), 2, "'2' is not an offload ratio", "--ratio 0.1"),
        (("--head-dim", "72"), 2, "'72'", "--help"),
        (("--dtype", "float32"), 2, "'float32'", "--help"),
        (("-o", "a.txt"), 2, "a.txt", "-o a.csv"),
        *((args, 2, f"{args[0]} is an option of --kernel gemm, not of --kernel attention",
           "--head-dim") for args in (("--shape", "8x8"), ("--rows", "8"), ("--ablations",))),
        (("--model", "opt-30b"), 2, "of --kernel gemm and whole models, not of --kernel attention",
         "leave it out"),
        (("-n", "8"), 2, "--rows is an option of --kernel gemm", "--case, --head-dim"),
        ((), 3, "CUDA GPU", "dakrun doctor"),
    ],
)  # fmt: skip
def test_errors(
    args: tuple[str, ...], code: int, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(run("--kernel", "attention", *args), code, said, hint)


@pytest.mark.parametrize("args", [("--case", "1:8/8:64"), ("--head-dim", "128")])
def test_options_of_the_other_kernel(args: tuple[str, ...]) -> None:
    both = "--kernel attention and --kernel prompt-attention"
    said = f"{args[0]} is an option of {both}, not of --kernel gemm"
    refused(run("--kernel", "gemm", *args), 2, said, "--shape, --model, --rows, --ablations")


def test_every_kernel_has_options_of_its_own() -> None:
    names = {param.name for param in main.commands["bench"].params}
    assert all(set(own) <= names for own in OPTIONS_OF.values())


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = ("--case", "64:32/8:2048", "--head-dim", "80", "--ratio", "0.5")
    wanted = sweep(cases=("64:32/8:2048",), head_dim="80", ratios=("0.5",))
    check_command("attention", args, wanted, record(), tmp_path, monkeypatch)


Launched = list[tuple[list[int], list[int]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Launches that a CPU does: the addresses and the lengths of the slots of each."""
    found: Launched = []

    def attend(*operands: Any, scale: float, pdl: bool) -> None:
        qkv, others = operands[:3], operands[3:]
        q, (tables, lengths, config, *_) = qkv[0], others
        kernel._check_operands(qkv, (tables, None), *others[1:], None)
        caches = tables.addresses[:, 0]
        assert pdl and scale == q.shape[2] ** -0.5
        for address in caches.tolist():
            held = (ctypes.c_uint8 * config.shape.slot_bytes).from_address(address)
            slot = torch.frombuffer(held, dtype=torch.uint8)
            for part in kv_blocks.unpack(slot, q.dtype, config.shape):
                assert part.float().std() == pytest.approx(1, rel=0.2)
        found.append((caches.tolist(), lengths.tolist()))

    on_the_cpu(monkeypatch)
    monkeypatch.setattr("dakrun.lab.chains.attention.list_items", lambda *_, **__: None)
    monkeypatch.setattr("dakrun.lab.chains.attention.splitk_flash_attn", attend)  # needs a GPU
    return found


@pytest.mark.parametrize("units", [(4,), (4, 0), (3, 1), (0, 4)])
@pytest.mark.parametrize(
    ("text", "dtype"), [("4:8/2:100", torch.float16), ("4:8/2:1-100", torch.bfloat16)]
)
def test_chains_read_every_slot(
    launched: Launched, units: tuple[int, ...], text: str, dtype: torch.dtype
) -> None:
    some = case(text, units)
    sizes = dict(zip((LOCAL, "host"), buffer_bytes([some], 256), strict=False))
    with Room(torch.device("cpu")) as room:
        buffers = room.at_least(sizes)
        chains = AttentionChains(buffers, dtype, H200, replays=3)
        chains.fill(some.operand)
        access = [TierAccess(), TierAccess(8, 256 * 1024)][: len(units)]
        assert chains.kernel(some, access) == ([1e-2 / 5] * 3, "splitk")
        # A slot is read once; those of a tier lie side by side from where its buffer begins.
        size = some.operand.unit_bytes("float16")
        held = [
            range(start := buffer.data_ptr(), start + 5 * nbytes, size)
            for buffer, nbytes in zip(buffers.values(), some.held_bytes, strict=True)
        ]
        read = [addresses for addresses, _ in launched]
        assert sorted(itertools.chain(*read)) == sorted(itertools.chain(*held))
        for addresses, lengths in launched:
            assert lengths == [length - 1 for length in some.operand.lengths]
            in_tiers = [sum(address in part for address in addresses) for part in held]
            assert in_tiers == list(units)
        assert chains.baseline(some) == [1e-2 / 5] * 3
        assert len(launched) == 5


@pytest.mark.parametrize("text", ["4:8/2:100", "4:2/2:100", "4:8/2:1-100", "4:2/2:50-100"])
def test_what_torch_reads(launched: Launched, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = case(text, (4,))
    real, read = torch.nn.functional.scaled_dot_product_attention, []

    def sdpa(q: torch.Tensor, *parts: torch.Tensor, **options: Any) -> torch.Tensor:
        for part in parts:
            assert part.shape == (4, 2, 100, 64) and part.is_contiguous()
            read.append((part.data_ptr(), part.data_ptr() + part.nbytes))
        out = real(q, *parts, **options)
        assert out.numel() == 4 * some.operand.heads * 64
        for number, length in enumerate(some.operand.lengths):
            # Of a slot alone, its query heads in groups: what a mask is to come to.
            keys, values = (part[number, :, :length] for part in parts)
            queries = q[number].reshape(2, -1, 64)
            alone = real(queries, keys, values)
            torch.testing.assert_close(out[number].view_as(alone), alone, atol=2e-3, rtol=2e-2)
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    buffer = torch.zeros(buffer_bytes([some], 256)[0], dtype=torch.uint8)
    chains = AttentionChains({LOCAL: buffer}, torch.float16, H200, replays=3)
    chains.fill(some.operand)
    chains.baseline(some)
    ends = sorted(read)
    assert len(ends) == 2 * some.launches
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= buffer.data_ptr() + buffer.numel()


def test_a_sweep_without_a_gpu(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = without_a_gpu(monkeypatch)
    wanted = sweep(
        cases=("5:8/2:65", "2:4/4:1"), head_dim="80", ratios=("0", TURNING_POINT, "1"),
        dtype="bfloat16",
    )  # fmt: skip
    said: list[str] = []
    found = measure_kernel(
        wanted, PROFILE, effort=replace(TINY, chain_bytes=1), command="it",
        progress=said.append,
    )  # fmt: skip
    assert found.head["command"] == "it" and taken == [[LOCAL, "host"]]
    assert said[0].startswith("measuring 6 cases") and said[1].startswith("5:8/2:65 0.00% remote")
    assert [(row["case"], row["ratio"]) for row in found.rows] == [
        *(("5:8/2:65", ratio) for ratio in (0, 0.2, 1)),
        *(("2:4/4:1", ratio) for ratio in (0, 0, 1)),
    ]
    for row in found.rows:
        assert row["time_s"] == row["sdpa_s"] == 1e-2 / 4
        assert row["launches"] == 4 and row["predicted_s"] > 0
    assert len(launched) == 6 * 4


@pytest.mark.alone
@pytest.mark.gpu
def test_a_tiny_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = sweep(
        cases=("3:8/8:100", "4:32/8:1-2048"), ratios=("0", "0.5", TURNING_POINT), dtype="bfloat16"
    )
    taken = torch.cuda.memory_allocated()
    found = measure_kernel(wanted, PROFILE, effort=TINY, command="it", progress=print)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found.rows) == 7
    check_measured(found, "kv", ("sdpa_s", "predicted_s"))
    assert torch.cuda.memory_allocated() < taken + 128 * MIB, "the buffers are given back"
