"""How weights and KV are stored: a file for each format of the row blocks of a matrix, and kv.py.

weight_format.py says what a weight format tells the others; split.py orders the row blocks of a
packed one. Imports no torch: only the functions that read and write elements do.
"""

from dakrun.formats.kv import KVLayout
from dakrun.formats.packed16 import PACKED16, Packed16
from dakrun.formats.rows import Rows
from dakrun.formats.split import Split, stretches
from dakrun.formats.weight_format import Array, WeightFormat

# Formats that kernels read; they are compiled for each of them.
KERNEL_FORMATS: tuple[WeightFormat, ...] = (PACKED16,)

__all__ = [
    "KERNEL_FORMATS",
    "PACKED16",
    "Array",
    "KVLayout",
    "Packed16",
    "Rows",
    "Split",
    "WeightFormat",
    "stretches",
]
