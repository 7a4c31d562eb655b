"""Models: config.json and names, the table of their layers, and the one forward pass.

architectures.py has the table, one row a family, which planner, loader and forward pass read.
decoder.py is the forward pass over a backend; hub.py, files.py and hf_config.py find and read a
model's folder, known.py has the sizes of well-known models. Importing this imports no torch.
"""

from typing import TYPE_CHECKING

from dakrun.models.architectures import Architecture, Family, Matrix, Norm, architecture
from dakrun.models.files import read_json_object, stored_dtype
from dakrun.models.hf_config import parse_model_config, read_model_config
from dakrun.models.hub import model_config, model_directory
from dakrun.models.known import hub_id, known_model, known_names

if TYPE_CHECKING:
    from dakrun.models.decoder import Attention, Backend, Decoder
    from dakrun.models.layers import layer_norm, rms_norm, rope_table, rotate

__all__ = [
    "Architecture",
    "Attention",
    "Backend",
    "Decoder",
    "Family",
    "Matrix",
    "Norm",
    "architecture",
    "hub_id",
    "known_model",
    "known_names",
    "layer_norm",
    "model_config",
    "model_directory",
    "parse_model_config",
    "read_json_object",
    "read_model_config",
    "rms_norm",
    "rope_table",
    "rotate",
    "stored_dtype",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the modules that need torch when one of their names is first used."""
        from importlib import import_module

        if name in __all__:
            for module in ("decoder", "layers"):
                found = vars(import_module(f"{__name__}.{module}"))
                if name in found:
                    return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
