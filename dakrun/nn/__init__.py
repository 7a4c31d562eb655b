"""Torch modules for inference with operands partly in a remote tier, read in place.

SplitKGEMM replaces nn.Linear (gemm.py), in a whole model by replace.py, with the ratios of a plan
if one is given (planned.py). SplitKExperts replaces the experts of transformers' models
(experts.py), SplitKFlashAttn is attention over a PartitionedKVCache (attention.py, kv_cache.py);
huggingface.py uses the latter in models of transformers.

A model of transformers with a tenth of each weight in host memory, and its decode step in a CUDA
graph:

>>> import torch
>>> from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache
>>> from dakrun.nn import replace_linears
>>> tokenizer = AutoTokenizer.from_pretrained("path/to/model")
>>> model = AutoModelForCausalLM.from_pretrained("path/to/model", dtype=torch.float16)
>>> modules = replace_linears(model, ratio=0.1, device="cuda")
>>> model = model.cuda()  # the rest: embeddings and norms
>>> prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids.cuda()
>>> cache = StaticCache(model.config, max_cache_len=128)
>>> def step(ids: torch.Tensor) -> torch.Tensor:
...     logits = model(ids, past_key_values=cache).logits
...     return logits[:, -1].argmax(-1, keepdim=True)
>>> with torch.inference_mode():
...     token = step(prompt)
...     tokens = [token.clone(), step(token)]  # the first decode step compiles the kernels
...     token.copy_(tokens[-1])
...     graph = torch.cuda.CUDAGraph()
...     with torch.cuda.graph(graph):
...         token.copy_(step(token))
...     for _ in range(30):
...         graph.replay()
...         tokens.append(token.clone())
>>> print(tokenizer.decode(torch.cat(tokens, dim=1)[0]))
"""

from dakrun.nn.attention import SplitKFlashAttn
from dakrun.nn.experts import SplitKExperts, replace_experts
from dakrun.nn.gemm import SplitKGEMM
from dakrun.nn.kv_cache import PartitionedKVCache
from dakrun.nn.replace import replace_linears
from dakrun.nn.tiers import profiled_access

__all__ = [
    "PartitionedKVCache",
    "SplitKExperts",
    "SplitKFlashAttn",
    "SplitKGEMM",
    "profiled_access",
    "replace_experts",
    "replace_linears",
]
