"""A second GPU, for tests that need one."""

from dataclasses import replace

import pytest
import torch

from dakrun.hardware import HardwareProfile
from dakrun.profile_files import find_profile, load_profile


def readable_peer() -> int:
    """The number of a GPU whose memory torch's current one can read; skips where there is none."""
    here = torch.cuda.current_device()
    for other in range(torch.cuda.device_count()):
        if other != here and torch.cuda.can_device_access_peer(here, other):
            return other
    pytest.skip("needs a second GPU that this one can read")


def with_peer(peer: int) -> HardwareProfile:
    """The current GPU's profile, with GPU `peer` read as one H200 reads another."""
    here = find_profile(device="cuda", name=torch.cuda.get_device_name())
    there = replace(load_profile("h200-nvlink-peer").tier("peer:1"), name=f"peer:{peer}")
    return replace(here, name="with-peer", remote=(here.tier("host"), there))
