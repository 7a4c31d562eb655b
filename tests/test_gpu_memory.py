"""On a GPU, a run uses at most the memory that its plan says, from loading to the last token."""

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dakrun.config import SamplingParams
from dakrun.llm import LLM
from dakrun.memory.limits import pci_address
from dakrun.plan import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GIB = 1 << 30
POLL_SECONDS = 0.002


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Used:
    """Bytes of the GPU in use by all processes, as the driver counts them (NVML)."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        assert self._nvml.nvmlInit_v2() == 0
        self._device = ctypes.c_void_p()
        address = pci_address(torch.cuda.get_device_properties(0)).encode()
        found = self._nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(self._device))
        assert found == 0
        self.peak = 0

    def now(self) -> int:
        """Bytes in use now."""
        memory = _Memory()
        assert self._nvml.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) == 0
        return memory.used

    @contextmanager
    def polled(self) -> Iterator[None]:
        """In the block, keep the most bytes in use in `peak`."""
        ended = threading.Event()

        def poll() -> None:
            while not ended.is_set():
                self.peak = max(self.peak, self.now())
                time.sleep(POLL_SECONDS)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def only(free: int | None) -> Iterator[None]:
    """In the block, leave `free` bytes of the GPU's memory, or all of it."""
    gc.collect()
    torch.cuda.empty_cache()
    available = torch.cuda.mem_get_info()[0]
    if free is not None and available < free:
        pytest.skip(f"{available} bytes of the GPU are free, {free} are needed")
    taken = torch.empty(0 if free is None else available - free, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del taken
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("model", "batch_size", "length", "free", "policy"),
    [
        ("opt-6.7b", 8, 1024, 9 * GIB, {}),
        ("llama-3-8b", 64, 1024, None, {"offload_ratio": 0.0}),
        ("opt-1.3b", 512, 128, None, {"offload_ratio": 0.3, "transport": "staged"}),
        ("opt-1.3b", 1, 64, None, {"offload_ratio": 1.0, "transport": "direct"}),
    ],
)
def test_a_run_uses_at_most_what_is_planned(
    model: str, batch_size: int, length: int, free: int | None, policy: dict[str, Any]
) -> None:
    with only(free):
        used = Used()
        start = used.now()
        with (
            used.polled(),
            LLM(
                model,
                load_format="dummy",
                batch_size=batch_size,
                max_model_len=length,
                policy=Policy(**policy),
            ) as llm,
        ):
            memory = llm.plan.memory(0)
            prompts = [range(3 + i, 3 + i + length // 2) for i in range(batch_size)]
            params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, top_p=0.9)
            llm.generate(prompts, params)
            llm.generate([p[: 1 + i % len(p)] for i, p in enumerate(prompts)], params)
            llm.report()
            assert not llm.replanned
            assert used.peak - start <= sum(memory.values()) - memory["context"]


def test_a_gpu_that_another_program_fills_is_planned_for_once_more() -> None:
    """A ballast taken between the plan and the load, as another program would."""
    with only(6 * GIB):
        taken = []

        class Slower(LLM):
            def _start(self) -> None:
                if not taken:
                    taken.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))
                super()._start()

        with Slower("opt-6.7b", load_format="dummy", batch_size=2, max_model_len=256) as llm:
            assert "ran out" in llm.replanned or "needs" in llm.replanned
            assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))) == 1
