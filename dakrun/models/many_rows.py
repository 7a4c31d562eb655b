"""The name by which `dakrun profile` knows dakrun.kernels.products."""

from dakrun.kernels.products import Products as ManyRows
from dakrun.kernels.products import tiles

__all__ = ["ManyRows", "tiles"]
