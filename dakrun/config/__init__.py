"""Descriptions of a run.

model.py has the architecture (rope.py its rotary positions) and the workload, popularity.py the use
of experts, sampling.py how tokens are chosen, and speculation.py whether they are drafted.
"""

from dakrun.config.model import (
    DTYPE_BYTES,
    MAX_SIZE,
    Activation,
    Dtype,
    FamilyName,
    LoadFormat,
    MixtureConfig,
    ModelConfig,
    NormKind,
    Routing,
    Workload,
    model_len,
)
from dakrun.config.popularity import Popularity
from dakrun.config.rope import LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from dakrun.config.sampling import (
    ADJUSTING,
    MAX_BIASES,
    MAX_LOGPROBS,
    NEUTRAL_SAMPLING,
    SEED_BITS,
    SamplingParams,
)
from dakrun.config.speculation import MAX_DRAFT, OFF, Speculation

__all__ = [
    "ADJUSTING",
    "DTYPE_BYTES",
    "MAX_BIASES",
    "MAX_DRAFT",
    "MAX_LOGPROBS",
    "MAX_SIZE",
    "NEUTRAL_SAMPLING",
    "OFF",
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
    "Speculation",
    "Workload",
    "YarnRope",
    "model_len",
]
