"""Which devices run the kernels: those with a target of theirs and enough shared memory."""

import pytest
import torch
from cards import properties

from dakrun.kernels.runtime import has_kernels


@pytest.mark.parametrize(
    ("capability", "shared_kib", "runs"),
    [
        ("9.0", 228, True),
        ("10.0", 228, True),
        ("10.3", 228, False),  # no target
        ("12.0", 100, True),
        ("12.1", 100, True),
        ("12.0", 64, False),  # a target, but too little shared memory
        ("8.0", 164, False),
    ],
)
def test_a_gpu_needs_a_target_and_shared_memory(
    monkeypatch: pytest.MonkeyPatch, capability: str, shared_kib: int, runs: bool
) -> None:
    found = properties(capability, shared_kib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert has_kernels(torch.device("cuda", 0)) is runs


def test_a_cpu_has_none() -> None:
    assert not has_kernels(torch.device("cpu"))
