"""What the emulator must see: kernels with one error each, which fail where the real ones pass."""

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import emulated
import pytest
import torch
from attended import Case
from cards import hold_to, hopper
from emulated import EmulatedKernel, of_name
from prompt_cases import PromptCase
from test_gemm_emulated import normal, run
from test_tiled_gemm_emulated import run as run_tiled

from dakrun.kernels.gemm import HalvesWorkspace
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.runtime import jit, operands
from dakrun.launches import splitk as splitk_launches

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
Fixed = list[EmulatedKernel]
Mutate = Callable[[str, str, str], None]
Two = Callable[[int, int], None]


@pytest.fixture
def kernels(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Fixed:
    """The kernels that were asked for, of the sources as they are then."""
    used: Fixed = []

    def build(source: str, name: str, defines: dict[str, int] | None = None) -> EmulatedKernel:
        folder = tmp_path_factory.mktemp("kernel")
        named = of_name(lambda: folder)
        used.append(named(source, name, {**(defines or {}), "WGMMA": 1}))
        return used[-1]

    monkeypatch.setattr(jit, "kernel", build)
    monkeypatch.setattr(gemm, "atoms_map", emulated.atoms_map)
    monkeypatch.setattr(operands, "check_gpu", lambda _: None)
    return used


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Replaces one place of a file of native/ before it is compiled."""

    def replace(name: str, old: str, new: str) -> None:
        sources = dict(emulated.sources())
        assert sources[name].count(old) == 1, f"{name}: {old}"
        sources[name] = sources[name].replace(old, new)
        monkeypatch.setattr(emulated, "sources", lambda: sources)

    return replace


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets how many CTAs interleave, and the seed."""
    launch = EmulatedKernel.launch

    def choose(ctas: int, seed: int) -> None:
        def launched(kernel: EmulatedKernel, *args: object, **more: object) -> None:
            kernel.together, kernel.seed = ctas, seed
            launch(kernel, *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(EmulatedKernel, "launch", launched)

    return choose


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch, kernels: Fixed) -> Callable[[], torch.Tensor]:
    """Y of a GEMM in which two CTAs each sum half of K for the same rows."""
    monkeypatch.setattr(splitk_launches, "half_columns", lambda *_: 512)
    empty = HalvesWorkspace.empty

    def poisoned(*args: Any) -> HalvesWorkspace:
        workspace = empty(*args)
        assert workspace.partials.numel() > 0
        workspace.partials.fill_(torch.nan)
        return workspace

    monkeypatch.setattr(HalvesWorkspace, "empty", poisoned)
    weight = normal(160, 1000, scale=1000**-0.5)
    return lambda: run(weight, 64)


def test_ctas_combine_halves_in_turns(halves: Callable[[], torch.Tensor], together: Two) -> None:
    wanted = halves()
    for seed in range(4):
        together(3, seed)
        assert torch.equal(halves(), wanted)


def test_an_arrival_before_the_partial_sums_is_seen(
    halves: Callable[[], torch.Tensor], mutate: Mutate, together: Two
) -> None:
    """Only if CTAs interleave: else the first to arrive has stored all before the second begins."""
    wanted = halves()
    store = "  store_partial(own, row_blocks, acc);\n"
    before = "  before = __shfl_sync(0xffffffff, before, 0);\n"
    mutate("splitk_combine.cuh", store, "")
    late = "  for (int i = 0; before == 0 && i < 4000; i++) ptx::sleep(1);\n"
    mutate("splitk_combine.cuh", before, before + late + store)
    together(1, 0)
    assert torch.equal(halves(), wanted)
    found = []
    for seed in range(4):
        together(3, seed)
        found.append(torch.equal(halves(), wanted))
    assert not all(found)


def test_ctas_of_attention_combine_in_turns(kernels: Fixed, together: Two) -> None:
    case = Case((640, 63, 64, 330), 2, 4, 64)
    for seed in range(4):
        together(5, seed)
        slots = case.slots()
        config = dataclasses.replace(case.config(sms=5), split_blocks=1, chunk_blocks=1)
        case.check(case.run(config, slots), slots, 1e-3)


def test_an_arrival_that_is_not_atomic_is_seen(
    kernels: Fixed, mutate: Mutate, together: Two
) -> None:
    """Two splits of a KV head then count as one, and the counter is left above zero."""
    mutate(
        "attention_merge.cuh",
        "ptx::atomic_add_acq_rel(at, more) == all - more;",
        "*at == all - more;\n  const int before = *at;\n"
        "  for (int i = 0; i < 4000; i++) ptx::sleep(1);\n  *at = before + more;",
    )
    case = Case((640, 700), 1, 4, 64)
    config = dataclasses.replace(case.config(sms=5), split_blocks=1, chunk_blocks=1)
    together(5, 0)
    with pytest.raises(AssertionError):
        case.run(config, case.slots())


def test_a_store_before_the_wait_is_seen(
    halves: Callable[[], torch.Tensor], mutate: Mutate
) -> None:
    """Plain stores of threads that do not wait, in a kernel in which others do."""
    halves()
    begin = "  Scheduler at(args, tier_of_cta);\n"
    mutate("splitk_gemm.cu", begin + "  ptx::wait_for_dependencies();\n", begin)
    with pytest.raises(AssertionError, match="written before the wait"):
        halves()


def test_a_kernel_that_never_waits_is_seen(
    kernels: Fixed, mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its launch may overlap its predecessor."""
    case = Case((5, 70), 1, 4, 64)
    mutate("splitk_flash_attn.cu", "  ptx::wait_for_dependencies();\n", "")
    launch = EmulatedKernel.launch
    monkeypatch.setattr(
        EmulatedKernel, "launch", lambda *args, **more: launch(*args, **{**more, "pdl": True})
    )
    with pytest.raises(AssertionError, match="written before the wait"):
        case.run(case.config(sms=5), case.slots())


def test_outputs_that_tma_reads_before_a_fence_are_seen(
    kernels: Fixed, mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain stores to shared memory, behind which TMA stores a box of them."""
    for name in ("atoms_map", "boxes_map"):
        monkeypatch.setattr(tiled_gemm, name, getattr(emulated, name))
    weight = normal(64, 128)
    run_tiled(weight, 40)
    mutate("tiled_output.cuh", "    if (boxes) ptx::fence_proxy_async();", "")
    with pytest.raises(AssertionError, match="without a proxy fence"):
        run_tiled(weight, 40)


def test_copies_that_wgmma_reads_before_a_fence_are_seen(
    kernels: Fixed, mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cp.async's writes are of the generic proxy, as plain stores are."""
    hold_to(hopper(3), monkeypatch)
    case = PromptCase([(0, 9), (70, 5)], 1, 2, 64, torch.float16)
    case.check(case.run(), 2e-3)
    mutate("prompt_producer.cuh", "    ptx::fence_proxy_async();\n", "")
    with pytest.raises(AssertionError, match="without a proxy fence"):
        case.run()
