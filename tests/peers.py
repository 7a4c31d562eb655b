"""Other GPUs, for tests that need them."""

from dataclasses import replace

import pytest
import torch

from dakrun.hardware import HardwareProfile, find_profile, load_profile


def readable_peers(count: int) -> list[int]:
    """The numbers of `count` GPUs whose memory torch's current one can read; skips without."""
    here = torch.cuda.current_device()
    others = [n for n in range(torch.cuda.device_count()) if n != here]
    found = [n for n in others if torch.cuda.can_device_access_peer(here, n)]
    if len(found) < count:
        pytest.skip(f"needs {count} more GPUs that this one can read")
    return found[:count]


def readable_peer() -> int:
    """The number of a GPU whose memory torch's current one can read; skips where there is none."""
    return readable_peers(1)[0]


def with_peers(*peers: int) -> HardwareProfile:
    """The current GPU's profile, with GPUs `peers` read as one H200 reads another."""
    here = find_profile(device="cuda", name=torch.cuda.get_device_name())
    like = load_profile("h200-nvlink-peer").tier("peer:1")
    there = tuple(replace(like, name=f"peer:{peer}") for peer in peers)
    return replace(here, name="with-peers", remote=(here.tier("host"), *there))
