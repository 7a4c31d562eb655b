"""A machine in figures: profiles of bandwidths, rates and costs, in TOML files.

profile.py has HardwareProfile, parts.py its parts, estimates.py costs that it has not measured,
profile_toml.py its text, files.py the profiles that are shipped or kept, card.py the GPU as
launches see it, kernels.py how kernels run on a card, or why they do not. Imports neither torch nor
CUDA.
"""

from dakrun.hardware.card import ANY_ROWS, BARRIER_BYTES, MIN_SHARED_BYTES, Card
from dakrun.hardware.descriptions import describe_profile, spread_warning
from dakrun.hardware.estimates import ESTIMATED, QUANTIZED, weight_rate
from dakrun.hardware.files import (
    cpu_name,
    find_profile,
    gpu_names,
    kept_profile,
    kept_profiles_dir,
    load_profile,
    save_profile,
    shipped_profiles,
)
from dakrun.hardware.kernels import RUN_ON, how_kernels_run, why_no_kernels
from dakrun.hardware.parts import (
    LOCAL,
    ComputeRate,
    KernelModel,
    OpCosts,
    Provenance,
    Published,
    RemoteTier,
    Sweep,
)
from dakrun.hardware.profile import HardwareProfile
from dakrun.hardware.profile_toml import SCHEMA, parse_profile, profile_text

__all__ = [
    "ANY_ROWS",
    "BARRIER_BYTES",
    "ESTIMATED",
    "LOCAL",
    "MIN_SHARED_BYTES",
    "QUANTIZED",
    "RUN_ON",
    "SCHEMA",
    "Card",
    "ComputeRate",
    "HardwareProfile",
    "KernelModel",
    "OpCosts",
    "Provenance",
    "Published",
    "RemoteTier",
    "Sweep",
    "cpu_name",
    "describe_profile",
    "find_profile",
    "gpu_names",
    "how_kernels_run",
    "kept_profile",
    "kept_profiles_dir",
    "load_profile",
    "parse_profile",
    "profile_text",
    "save_profile",
    "shipped_profiles",
    "spread_warning",
    "weight_rate",
    "why_no_kernels",
]
