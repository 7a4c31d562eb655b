"""Weight formats: how the row blocks of a matrix are stored, one file each.

weight_format.py says what a format tells the others; split.py orders the row blocks of a packed
one. Imports no torch: only the functions that read and write elements do.
"""

from dakrun.formats.packed16 import PACKED16, Packed16
from dakrun.formats.rows import Rows
from dakrun.formats.split import Split, stretches
from dakrun.formats.weight_format import Array, WeightFormat

__all__ = ["PACKED16", "Array", "Packed16", "Rows", "Split", "WeightFormat", "stretches"]
