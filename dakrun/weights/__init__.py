"""Checkpoints: safetensors files read, norms folded, rows put into the tiers of a plan.

The operands of a model (models/operands.py) say which tensors make them up. checkpoint.py and
dummy.py are the sources (random_routers.py: which experts random weights choose), streaming.py
reads files ahead, parts.py decodes quantized tensors, loading.py folds norms into matrices and
fills the tiers. convert.py and bins.py make safetensors of pytorch_model*.bin files, gguf_files.py
and gguf_metadata.py of GGUF files.
"""

from dakrun.weights.checkpoint import Checkpoint
from dakrun.weights.convert import convert_checkpoint
from dakrun.weights.dummy import Dummy
from dakrun.weights.gguf_files import convert_gguf
from dakrun.weights.loading import Packing, Weights, load, tier_capacities, unreadable

__all__ = [
    "Checkpoint",
    "Dummy",
    "Packing",
    "Weights",
    "convert_checkpoint",
    "convert_gguf",
    "load",
    "tier_capacities",
    "unreadable",
]
