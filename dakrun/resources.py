"""Paths of the folders `native` (CUDA sources) and `profiles` (hardware TOMLs), and of the cache.

`native` and `profiles` are at the top of a checkout, and inside the package in an installed wheel.
"""

import os
from pathlib import Path
from typing import Literal

from dakrun.errors import CannotRun

PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: Literal["native", "profiles"]) -> Path:
    """The folder `name`: beside the package in a checkout, else `dakrun/_resources/name`.

    Raises CannotRun if neither exists (a copy of the package alone, or a broken install).
    """
    in_checkout = PACKAGE.parent / name
    if (PACKAGE.parent / "pyproject.toml").is_file() and in_checkout.is_dir():
        return in_checkout
    installed = PACKAGE / "_resources" / name
    if installed.is_dir():
        return installed
    raise CannotRun(
        f"dakrun's folder {name!r} is missing: neither {installed} nor a checkout's {in_checkout}",
        hint="install dakrun again with pip, or run it from a complete checkout",
    )


def cache_dir() -> Path:
    """The folder for compiled kernels and measured profiles; it may not exist yet.

    $DAKRUN_CACHE_DIR, else $XDG_CACHE_HOME/dakrun, else ~/.cache/dakrun.
    """
    if own := os.environ.get("DAKRUN_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dakrun"
