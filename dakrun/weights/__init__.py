"""Checkpoints: safetensors files read, norms folded, rows put into the tiers of a plan.

manifest.py says which tensors make up each operand, checkpoint.py and dummy.py are the sources,
streaming.py reads files ahead, loading.py fills the tiers. convert.py and bins.py make safetensors
of pytorch_model*.bin files, gguf_files.py of GGUF files.
"""

from dakrun.weights.checkpoint import Checkpoint
from dakrun.weights.convert import convert_checkpoint
from dakrun.weights.dummy import Dummy
from dakrun.weights.gguf_files import convert_gguf
from dakrun.weights.loading import Packing, can_pack, load, tier_capacities
from dakrun.weights.manifest import Fold, Manifest, Weights, manifest_of
from dakrun.weights.streaming import Extent, read, stream

__all__ = [
    "Checkpoint",
    "Dummy",
    "Extent",
    "Fold",
    "Manifest",
    "Packing",
    "Weights",
    "can_pack",
    "convert_checkpoint",
    "convert_gguf",
    "load",
    "manifest_of",
    "read",
    "stream",
    "tier_capacities",
]
