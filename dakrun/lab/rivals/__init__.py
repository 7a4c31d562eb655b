"""Other programs: decode steps of the same architecture with random weights, and kernels.

steps.py measures all of them. architecture.py makes the model of transformers that is like one of
dakrun's. host_layers.py keeps some of its layers in host memory, read there or copied ahead of use;
on_demand.py keeps some of its experts there. vllm.py runs vLLM in a process of its own.
flashinfer.py has FlashInfer's attention alone.
"""
