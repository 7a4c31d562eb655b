"""A machine in figures: profiles of bandwidths, rates and costs, in TOML files.

profile.py has HardwareProfile and its TOML form, parts.py the parts of a profile, files.py the
profiles that are shipped or kept, kernels.py the cards that dakrun's kernels
run on. Imports neither torch nor CUDA.
"""

from dakrun.hardware.files import (
    cpu_name,
    find_profile,
    gpu_names,
    kept_profile,
    kept_profiles_dir,
    load_profile,
    shipped_profiles,
)
from dakrun.hardware.kernels import kernels_run, shared_bytes_per_block, why_no_kernels
from dakrun.hardware.parts import (
    LOCAL,
    ComputeRate,
    KernelModel,
    OpCosts,
    OtherSchema,
    Provenance,
    Published,
    RemoteTier,
    Sweep,
)
from dakrun.hardware.profile import SCHEMA, HardwareProfile

__all__ = [
    "LOCAL",
    "SCHEMA",
    "ComputeRate",
    "HardwareProfile",
    "KernelModel",
    "OpCosts",
    "OtherSchema",
    "Provenance",
    "Published",
    "RemoteTier",
    "Sweep",
    "cpu_name",
    "find_profile",
    "gpu_names",
    "kept_profile",
    "kept_profiles_dir",
    "kernels_run",
    "load_profile",
    "shared_bytes_per_block",
    "shipped_profiles",
    "why_no_kernels",
]
