"""Whether dakrun's kernels run on a card, by its compute capability and its shared memory.

The one rule for GPUs at hand (kernels/runtime/jit.py) and for those that a profile describes.
"""

from dakrun.geometry import KERNEL_TARGETS, SHARED_BYTES_ALONE
from dakrun.hardware.profile import HardwareProfile

DRIVER_BYTES = 1024  # of an SM's shared memory, which the driver keeps for each block


def kernels_run(capability: str, shared_bytes: int) -> bool:
    """Whether a card of this compute capability, such as "9.0", runs the kernels.

    `shared_bytes` is the shared memory of a block at most.
    """
    target = f"sm_{capability.replace('.', '')}a"
    return target in KERNEL_TARGETS and shared_bytes >= SHARED_BYTES_ALONE


def shared_bytes_per_block(profile: HardwareProfile) -> int | None:
    """Shared memory of a block at most on the profile's card; None where its facts lack the SM's.

    A block alone on an SM has all of it but DRIVER_BYTES (CUDA C++ Programming Guide, technical
    specifications by compute capability).
    """
    of_sm = profile.facts.get("shared_bytes_per_sm")
    return of_sm - DRIVER_BYTES if isinstance(of_sm, int) else None


def why_no_kernels(profile: HardwareProfile) -> str | None:
    """A sentence for plans of a card that the kernels do not run on, or may not; else None.

    Plans assume kernels. A CPU has none, and its profile's costs are not those of kernels.
    """
    if profile.device != "cuda":
        return None
    capability, shared = profile.facts.get("compute_capability"), shared_bytes_per_block(profile)
    needed = f"{SHARED_BYTES_ALONE >> 10} KiB of shared memory a block"
    if shared is None or not isinstance(capability, str):
        return (
            f"profile {profile.name} has no compute_capability or shared_bytes_per_sm under "
            f"[facts], so that its card may lack what dakrun's kernels need ({needed}): generate "
            "would then run plain torch, slower than predicted"
        )
    if kernels_run(capability, shared):
        return None
    lacks = f"they need {needed}, it has {shared >> 10} KiB"
    if shared >= SHARED_BYTES_ALONE:
        lacks = f"they are not built for compute capability {capability}"
    return (
        f"dakrun's kernels do not run on {profile.device_name} ({lacks}): generate runs plain "
        "torch there, slower than predicted"
    )
