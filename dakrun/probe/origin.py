"""What a GPU's profile says besides figures to plan with: of what, when and how it was measured."""

import datetime
from collections.abc import Sequence

import torch

from dakrun.hardware.profile import Provenance, RemoteTier
from dakrun.probe.machine import numa, nvlink, pcie, visible_gpus
from dakrun.probe.measurement import STEADY, Measurement


def description(remote: Sequence[RemoteTier]) -> str:
    """The machine in a line."""
    peers = [tier.name for tier in remote if tier.name.startswith("peer")]
    text = f"{torch.cuda.get_device_name()}, host memory over PCIe"
    return text + (f", {len(peers)} peer GPU{'s' if len(peers) > 1 else ''}" if peers else "")


def provenance(measurements: Sequence[Measurement]) -> Provenance:
    """When and how it was measured, and how far the figures spread."""
    unsteady = [m for m in measurements if not m.steady]
    worst = max(measurements, key=lambda m: m.spread)
    return Provenance(
        kind="measured",
        date=datetime.date.today().isoformat(),
        source=f"dakrun profile: medians; bulk copies into shared memory, copy engine, cuBLAS of "
        f"torch {torch.__version__}, chains of dakrun's kernels in CUDA graphs; random data; "
        f"{len(unsteady)} of {len(measurements)} figures spread by more than {STEADY:.0%}, most "
        f"of all {worst.what} ({worst.spread:.0%})",
    )


def facts(device: torch.device, host_memory: int) -> dict[str, int | str]:
    """Sizes and links, for people."""
    properties = torch.cuda.get_device_properties(device)
    gpus = [gpu for gpu in visible_gpus() if gpu.index == device.index]
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "shared_bytes_per_sm": properties.shared_memory_per_multiprocessor,
        "l2_bytes": properties.L2_cache_size,
        "host_memory_bytes": host_memory,
        "numa": numa(gpus).finding,
        "pcie": "; ".join(check.finding for check in pcie(gpus)),
        **({"nvlink": links[0].finding} if (links := nvlink(gpus)) else {}),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
