"""Cards: from a profile or a compute capability, or held by hand; launches claim no more."""

from dataclasses import replace

import pytest
import torch
from cards import H200, SMALL, hold_to, hopper
from hypothesis import given
from hypothesis import strategies as st

from dakrun.geometry import HEAD_DIMS, SPLITK_MAX_ROWS
from dakrun.hardware import Card, HardwareProfile, load_profile
from dakrun.kernels.attention import KVShape, attention_config
from dakrun.kernels.runtime import card_of, held_to
from dakrun.launches import TierAccess, gemm_config, split_row_blocks

KIB = 1024


def test_a_hopper_and_a_small_card() -> None:
    assert (H200.shared_bytes, H200.ring_bytes) == (227 * KIB, 112 * KIB)
    assert (SMALL.shared_bytes, SMALL.ring_bytes) == (99 * KIB, 98 * KIB)
    assert H200.has_wgmma and not SMALL.has_wgmma
    assert [H200.max_clusters(ctas) for ctas in (1, 2, 8, 9)] == [132, 66, 15, 0]
    assert [SMALL.max_clusters(ctas) for ctas in (1, 2)] == [188, 0]
    assert Card.of("9.0", sms=66).clusters == (33, 19, 15, 11, 8, 7, 7), "in proportion"


def test_a_profile_s_card() -> None:
    h200 = load_profile("h200-pcie5")
    assert h200.card == H200 == replace(h200, facts={}).card, "what is not said is a Hopper's"
    assert load_profile("rtx-pro-6000").card == SMALL
    counted = replace(h200, clusters=(64, 38))
    assert HardwareProfile.from_toml(counted.to_toml(), source="x").card == hopper(
        132, clusters=(64, 38)
    )


def test_a_card_is_held_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    hold_to(H200, monkeypatch)
    with held_to(SMALL):
        assert card_of(gpu) is SMALL
    with pytest.raises(RuntimeError), held_to(SMALL):
        raise RuntimeError
    assert card_of(gpu) is H200


@pytest.mark.parametrize("card", [H200, SMALL])
@given(
    counts=st.lists(st.integers(0, 4000), min_size=1, max_size=3).filter(any),
    n=st.integers(1, SPLITK_MAX_ROWS),
    dim=st.sampled_from(HEAD_DIMS),
    alone=st.booleans(),
)
def test_launches_fit_the_card(
    card: Card, counts: list[int], n: int, dim: int, alone: bool
) -> None:
    """As many CTAs as share an SM fit its memory, 1 KiB for the driver and for barriers each."""
    tiers = [TierAccess(), TierAccess(8, 2**18), TierAccess(4)][: len(counts)]
    products = gemm_config(n, split_row_blocks(counts, tiers, card=card), tiers, card=card)
    attention = attention_config(KVShape(8, dim, 1000), counts, tiers, card=card, alone=alone)
    for config in (products, attention):
        shared = config.shared_bytes + 2 * KIB
        ctas = 1 if config is attention and alone else card.ctas_per_sm
        assert ctas * shared <= card.shared_bytes_per_sm + KIB * (ctas == 1)
    stages = [*(ring.stages for ring in products.rings), attention.stages]
    assert min(stages) >= 2
    if alone:
        assert 2 * attention.shared_bytes > card.shared_bytes_per_sm - 4 * KIB
