"""GLM-4.5 and 4.6 (arXiv 2508.06471): a sigmoid router, shared experts, dense first layers."""

from dakrun.config import ModelConfig
from dakrun.models.decoder import Decoder
from dakrun.models.llama import llama
from dakrun.models.qwen3_moe import mixture


def glm4_moe(c: ModelConfig) -> Decoder:
    """The GLM-4.5 model of `c`."""
    norms = (c.head_dim, c.head_dim) if c.head_norms else ()
    return llama(c, head_norms=norms, feed_forward=mixture)
