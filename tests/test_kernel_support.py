"""Which devices run the kernels: those with a target of theirs and enough shared memory."""

from types import SimpleNamespace

import pytest
import torch

from dakrun.kernels.runtime import has_kernels

KIB = 1024


@pytest.mark.parametrize(
    ("capability", "shared_kib", "runs"),
    [
        ((9, 0), 227, True),
        ((10, 0), 227, True),
        ((10, 3), 227, False),  # no target
        ((12, 0), 99, False),  # a target, but too little shared memory
        ((12, 1), 99, False),
        ((8, 0), 163, False),
    ],
)
def test_a_gpu_needs_a_target_and_shared_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared_kib: int, runs: bool
) -> None:
    major, minor = capability
    found = SimpleNamespace(
        major=major, minor=minor, shared_memory_per_block_optin=shared_kib * KIB
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert has_kernels(torch.device("cuda", 0)) is runs


def test_a_cpu_has_none() -> None:
    assert not has_kernels(torch.device("cpu"))
