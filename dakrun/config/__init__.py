"""Descriptions of a run.

model.py has the architecture and the workload, popularity.py the use of experts, sampling.py how
tokens are chosen.
"""

from dakrun.config.model import (
    DTYPE_BYTES,
    MAX_SIZE,
    Activation,
    Dtype,
    FamilyName,
    LinearRope,
    Llama3Rope,
    LoadFormat,
    LongRope,
    MixtureConfig,
    ModelConfig,
    NormKind,
    RopeScaling,
    Routing,
    Workload,
    YarnRope,
    model_len,
)
from dakrun.config.popularity import Popularity
from dakrun.config.sampling import (
    ADJUSTING,
    MAX_BIASES,
    MAX_LOGPROBS,
    NEUTRAL_SAMPLING,
    SEED_BITS,
    SamplingParams,
)

__all__ = [
    "ADJUSTING",
    "DTYPE_BYTES",
    "MAX_BIASES",
    "MAX_LOGPROBS",
    "MAX_SIZE",
    "NEUTRAL_SAMPLING",
    "SEED_BITS",
    "Activation",
    "Dtype",
    "FamilyName",
    "LinearRope",
    "Llama3Rope",
    "LoadFormat",
    "LongRope",
    "MixtureConfig",
    "ModelConfig",
    "NormKind",
    "Popularity",
    "RopeScaling",
    "Routing",
    "SamplingParams",
    "Workload",
    "YarnRope",
    "model_len",
]
