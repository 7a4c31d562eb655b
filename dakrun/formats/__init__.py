"""How weights and the KV cache are stored: a file for each weight format, and kv.py.

weight_format.py has the interface of a weight format; split.py has the order of packed row blocks.
Importing this folder imports no torch: functions that read or write elements import it.
"""

from dakrun.formats.kv import KVLayout
from dakrun.formats.packed16 import PACKED16, Packed16
from dakrun.formats.rows import Rows
from dakrun.formats.split import Split, stretches
from dakrun.formats.weight_format import Array, WeightFormat

# The formats that kernels read. Kernels are compiled for each format.
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
