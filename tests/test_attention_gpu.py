"""SplitK_FlashAttn on a GPU: as exact as on the CPU, the same bits in a graph and from any tier."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from attended import Case
from packed_linear import moved
from peers import readable_peer

from dakrun.kernels.attention import (
    AttentionConfig,
    AttentionWorkspace,
    BlockTables,
    list_items,
    splitk_flash_attn,
)
from dakrun.kernels.runtime import jit

pytestmark = pytest.mark.gpu
LENGTHS = (1055, 1, 64, -1, 63, 2048, 700)


def all_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def on_the_gpu(group: int, dim: int, dtype: torch.dtype, *, rope: bool, kv_heads: int = 4) -> Case:
    return Case(LENGTHS, kv_heads, group, dim, dtype, rope, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_it_is_exact(dim: int, group: int, dtype: torch.dtype) -> None:
    for rope in (False, True):
        case = on_the_gpu(group, dim, dtype, rope=rope)
        slots = case.slots()
        out = case.run(case.config(sms=all_sms()), slots)
        case.check(out, slots, 1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize("group", [1, 3, 4, 16])
def test_units_of_a_warp_each_add_up(group: int) -> None:
    """However many they are, of which few are added up for some heads at a time."""
    for unit in (2, 8):
        found = []
        for items, sms in ((1, all_sms()), (2, 20)):
            case = on_the_gpu(group, 128, torch.float16, rope=True)
            config = dataclasses.replace(
                case.config(sms=sms), split_blocks=unit, chunk_blocks=unit, item_splits=items
            )
            slots = case.slots()
            found.append(case.run(config, slots))
            case.check(found[-1], slots, 1e-3)
        assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16)), unit


@pytest.mark.parametrize("tier", ["host", "peer"])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_no_bit_depends_on_tiers_or_sms(group: int, tier: str) -> None:
    if tier == "peer":
        readable_peer()
    case = on_the_gpu(group, 128, torch.float16, rope=True)
    wanted = case.run(case.config(sms=all_sms()), case.slots())
    for local, sms in ((7, 20), (4, all_sms()), (0, all_sms()), (6, 50)):
        for mixed in (False, True):
            fresh = [
                moved(slot, tier) if n >= local else slot for n, slot in enumerate(case.slots())
            ]
            config = case.config((local, len(fresh) - local), sms=sms, mixed=mixed)
            out = case.run(config, fresh)
            assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), (local, sms, mixed)
            case.check(out, fresh, 1e-3)


def launch(case: Case, config: AttentionConfig, slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Ten overlapping launches on one workspace, each of which writes what it has read."""
    workspace = AttentionWorkspace.empty([config], case.group, case.device)
    starts = torch.tensor([slot.data_ptr() for slot in slots], device=case.device)
    tables = BlockTables.of_slots(starts, case.shape)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=case.device)
    out = torch.zeros(len(slots), case.q.shape[1] * case.dim, dtype=case.dtype, device=case.device)
    scale = case.dim**-0.5

    def chain() -> None:
        list_items(lengths, config, workspace)
        for number in range(10):
            splitk_flash_attn(
                case.q, case.k, case.v, tables, lengths, config, workspace, out, scale=scale,
                rotations=case.turns, pdl=number > 0,  # the first one waits for the list
            )  # fmt: skip

    torch.cuda.synchronize()
    chain()
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        live = [number for number, length in enumerate(case.lengths) if length >= 0]
        assert torch.equal(out[live].view(torch.int16), eager[live].view(torch.int16))
    assert not workspace.arrivals.any()
    return eager


@pytest.mark.parametrize("group", [1, 4])
def test_a_graph_of_overlapping_launches(group: int) -> None:
    case = on_the_gpu(group, 128, torch.float16, rope=True)
    config = case.config(sms=all_sms())
    alone = case.run(config, case.slots())
    found = launch(case, config, case.slots())
    live = [number for number, length in enumerate(case.lengths) if length >= 0]
    assert torch.equal(found[live].view(torch.int16), alone[live].view(torch.int16))


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("dim", [64, 128])
def test_slots_that_span_tiers_change_no_bit(dim: int, group: int) -> None:
    case = on_the_gpu(group, dim, torch.float16, rope=True)
    wanted = case.run(case.config(sms=all_sms()), case.slots())
    kept = ~wanted.isnan()
    for tiers in ((7, 0), (5, 2)):
        config = case.config(tiers, sms=all_sms(), reads_spilled=True)
        assert config.reads_spilled and config.ctas[1] > 0
        for spilled in ([0] * 7, [16, 0, 1, 3, 0, 30, 0], [20, 20, 20, 20, 20, 40, 20]):
            out = case.run(config, case.slots(), spilled=spilled)
            assert torch.equal(out[kept], wanted[kept]), (tiers, spilled)


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("dim", [64, 128])
def test_late_warps_and_poisoned_regions_change_no_bit(
    dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps sleep at random around the barriers at the end, between which regions hold NaN."""
    case = on_the_gpu(group, dim, torch.float16, rope=True)
    configs = [case.config(sms=sms) for sms in (all_sms(), 20)]
    wanted = [case.run(config, case.slots()) for config in configs]
    plain, built = jit.kernel, []

    def poisoned(source: str, name: str, defines: dict[str, int]) -> jit.Kernel:
        built.append(name)
        return plain(source, name, {**defines, "DAK_POISON": 1})

    monkeypatch.setattr(jit, "kernel", poisoned)
    for _ in range(20):
        for config, same in zip(configs, wanted, strict=True):
            slots = case.slots()
            out = case.run(config, slots)
            assert torch.equal(out.view(torch.int16), same.view(torch.int16))
    case.check(out, slots, 1e-3)
    assert built == ["list_items", "splitk_flash_attn"] * 40
