"""How weights and the KV cache are stored: README.md has the files.

Importing this folder imports no torch: functions that read or write elements import it.
"""

from dakrun.formats.device_layout import Quantised
from dakrun.formats.kv import KVLayout
from dakrun.formats.packed16 import PACKED16, Packed16
from dakrun.formats.quantised_rows import QuantisedRows
from dakrun.formats.quantization import Quantization
from dakrun.formats.rows import Rows
from dakrun.formats.split import Split, stretches
from dakrun.formats.stored import Malformed, Stored
from dakrun.formats.weight_format import Array, WeightFormat

# Formats that kernels read, of which tests compile all variants: of each kind of code the one that
# most checkpoints have.
KERNEL_FORMATS: tuple[WeightFormat, ...] = (
    PACKED16,
    Quantised("int4", 128),
    Quantised("e4m3", 128, 4),
)

__all__ = [
    "KERNEL_FORMATS",
    "PACKED16",
    "Array",
    "KVLayout",
    "Malformed",
    "Packed16",
    "Quantised",
    "QuantisedRows",
    "Quantization",
    "Rows",
    "Split",
    "Stored",
    "WeightFormat",
    "stretches",
]
