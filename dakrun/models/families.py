"""The families of models by name."""

import functools
from collections.abc import Callable, Mapping

from dakrun.config import FamilyName, ModelConfig
from dakrun.models.decoder import Decoder
from dakrun.models.glm4_moe import glm4_moe
from dakrun.models.llama import llama
from dakrun.models.mixtral import mixtral
from dakrun.models.olmoe import olmoe
from dakrun.models.opt import opt
from dakrun.models.phi3 import phi3
from dakrun.models.qwen3 import qwen3
from dakrun.models.qwen3_moe import qwen3_moe

FAMILIES: Mapping[FamilyName, Callable[[ModelConfig], Decoder]] = {
    "opt": opt,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": qwen3,
    "phi3": phi3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "glm4_moe": glm4_moe,
}


@functools.cache
def decoder_of(config: ModelConfig) -> Decoder:
    """The model of `config`, with the formats that its matrices are stored in.

    Raises CannotRun if a matrix cannot have its format.
    """
    model = FAMILIES[config.family](config)
    model.store()
    return model
