"""Chains of launches of the kernels, and of torch's, over operands in tiers: seconds of a launch.

Each case is a CUDA graph of launches with programmatic dependent launch. Every launch reads its own
operand, as layers of a model do. Operands have more than 2 GiB in total, so L2 serves none of them,
and a chain repeats its launches until it takes 4 ms. A time is the graph's time over its launches.
Each replay gives one time, after as many replays to warm up. Operands are random values in packed
order; their remote parts lie in page-locked host memory or in a peer GPU's memory. The baseline is
torch's kernel with all operands dense in HBM, whatever the ratio. base.py has the base class,
gemm.py chains of products, attention.py chains of decode and prompt attention.
"""

from dakrun.lab.cases import Operand, Prompts, Slots, Weight
from dakrun.lab.chains.attention import AttentionChains, PromptChains
from dakrun.lab.chains.base import Chains
from dakrun.lab.chains.gemm import GemmChains

CHAINS: dict[type[Operand], type[Chains]] = {
    Weight: GemmChains,
    Slots: AttentionChains,
    Prompts: PromptChains,
}

__all__ = ["CHAINS", "AttentionChains", "Chains", "GemmChains", "PromptChains"]
