"""The quantised modules of a checkpoint, and the format of each.

Knows names of modules, no files; models/quantization.py reads the settings of a checkpoint.
"""

import functools
import re
from dataclasses import dataclass

from dakrun.formats.stored import Stored

LINEARS = r"(?!.*embed_tokens$).*"  # every module with a product: all but tables of embeddings


@dataclass(frozen=True)
class Quantization:
    """The formats of modules by their names: of `groups`, (pattern, format), the first that fits.

    Patterns are regular expressions for whole names. Modules that fit one of `ignored`, or no
    group, have 16 bits. `method` is the name of the quantizer. `unapplied` says what else the
    checkpoint asks for, such as activations of 8 bits: products read the weights alone.
    """

    method: str
    groups: tuple[tuple[str, Stored], ...]
    ignored: tuple[str, ...] = ()
    unapplied: tuple[str, ...] = ()

    @functools.cached_property
    def _patterns(self) -> "tuple[re.Pattern[str], list[tuple[re.Pattern[str], Stored]]]":
        ignored = "|".join(f"(?:{pattern})" for pattern in self.ignored)
        groups = [(re.compile(pattern), stored) for pattern, stored in self.groups]
        return re.compile(ignored or "(?!)"), groups

    def of(self, module: str) -> Stored | None:
        """The format of the weight of `module`, None where it has plain elements."""
        ignored, groups = self._patterns
        if ignored.fullmatch(module):
            return None
        return next((stored for pattern, stored in groups if pattern.fullmatch(module)), None)

    @property
    def name(self) -> str:
        """The formats as people call them."""
        return " and ".join(dict.fromkeys(stored.name for _, stored in self.groups))
