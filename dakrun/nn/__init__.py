"""Torch modules with operands that lie partly in a remote tier and are read where they lie."""

from dakrun.nn.gemm import SplitKGEMM, replace_linears

__all__ = ["SplitKGEMM", "replace_linears"]
