"""Whether dakrun's kernels run on a card, how they run there, and if not, why."""

from dakrun.hardware.card import ANY_ROWS, MIN_SHARED_BYTES, Card
from dakrun.hardware.profile import HardwareProfile


def why_no_kernels(profile: HardwareProfile) -> str | None:
    """A sentence for plans of a card that the kernels do not run on, or may not; else None.

    Plans assume kernels. A CPU has none, and its profile's costs are not those of kernels.
    """
    if profile.device != "cuda":
        return None
    card, needed = profile.card, f"{MIN_SHARED_BYTES >> 10} KiB of shared memory a block"
    if not {"compute_capability", "shared_bytes_per_sm"} <= profile.facts.keys():
        return (
            f"profile {profile.name} has no compute_capability or shared_bytes_per_sm under "
            f"[facts], so that its card may lack what dakrun's kernels need ({needed}): generate "
            "would then run plain torch, slower than predicted"
        )
    if card.runs_kernels:
        return None
    lacks = f"they need {needed}, it has {card.shared_bytes >> 10} KiB"
    if card.shared_bytes >= MIN_SHARED_BYTES:
        lacks = f"they are not built for compute capability {card.capability}"
    return (
        f"dakrun's kernels do not run on {profile.device_name} ({lacks}): generate runs plain "
        "torch there, slower than predicted"
    )


RUN_ON = ("9.0",)  # compute capabilities of cards on which the kernels were run


def how_kernels_run(card: Card) -> str:
    """What the kernels use of `card`, which runs them, and what multiplies many rows of X."""
    ctas = "1 CTA" if card.ctas_per_sm == 1 else f"{card.ctas_per_sm} CTAs"
    parts = [
        f"{card.shared_bytes >> 10} KiB of shared memory a block",
        f"{ctas} an SM",
        "clusters with multicast" if card.clusters else "no clusters, no multicast",
        "wgmma" if card.has_wgmma else "mma.sync",
    ]
    if not card.tiled:
        many = "torch (cuBLAS, from unpacked weights) multiplies many rows"
    elif card.tiled_rows < ANY_ROWS:
        many = f"the tiled GEMM multiplies up to {card.tiled_rows} rows, torch (cuBLAS) more"
    else:
        many = "the tiled GEMM multiplies many rows"
    return f"{', '.join(parts)}; {many}"
