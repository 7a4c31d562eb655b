"""The engine: requests in, completions out, over a model whose operands lie in several tiers.

engine.py schedules requests; a runner computes their steps: graph_runner.py on the GPU's kernels
(decode_step.py, prefill.py, kernel_backend.py, staging.py), reference_runner.py in plain torch.
build.py makes the runner that a plan asks for.
"""
