"""Other programs: decode steps of the same architecture with random weights, and kernels.

steps.py measures all of them. architecture.py makes the model of transformers that is like one of
dakrun's. host_layers.py keeps some of its layers in host memory and reads them in place, and
prefetch.py copies them; on_demand.py keeps some of its experts there. vllm.py runs vLLM in a
process of its own. flashinfer.py has FlashInfer's attention alone.
"""
