"""Models: config.json and names, families as layers of modules, and the one forward pass.

modules.py has the modules that planner, loader and runners walk, operands.py the tensors of a
checkpoint that each is made of, decoder.py layers of modules and the forward pass over a backend,
experts.py a feed-forward of experts; a family (opt.py, llama.py and others, listed in families.py)
puts a model together. hub.py, files.py and hf_config.py find and read a model's folder
(hf_fields.py, hf_mixture.py and hf_rope.py have parts of its config.json), known.py has the sizes
of well-known models (those of mixtures are in known_mixtures.py, formats in known_quantized.py),
popularity.py the files that say how often experts are chosen. Only functional.py, norms and rotary
positions, needs torch.
"""

from dakrun.models.decoder import Backend, Decoder
from dakrun.models.families import decoder_of
from dakrun.models.files import check_shards, read_json_object
from dakrun.models.hf_config import parse_model_config, read_model_config
from dakrun.models.hub import model_config, model_directory, tokenizer_directory
from dakrun.models.known import hub_id, known_model, known_names
from dakrun.models.modules import Linear, Matrix, Module, Norm
from dakrun.models.operands import Operand, Scope, Source

__all__ = [
    "Backend",
    "Decoder",
    "Linear",
    "Matrix",
    "Module",
    "Norm",
    "Operand",
    "Scope",
    "Source",
    "check_shards",
    "decoder_of",
    "hub_id",
    "known_model",
    "known_names",
    "model_config",
    "model_directory",
    "parse_model_config",
    "read_json_object",
    "read_model_config",
    "tokenizer_directory",
]
