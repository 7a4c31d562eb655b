"""`dakrun bench`: kernels and models measured against this machine's memory bandwidth.

run.py goes from options to records. Cases to measure: gemm_sweep.py, attention_sweep.py,
model_sweep.py. Measuring: gemm.py and attention.py with the loop of kernel.py, and model.py, with
memory from tiers.py and ceilings from ceilings.py. Rivals of whole models: rival.py, prefetch.py,
on_demand.py. Results: rows.py, model_rows.py, output.py, model_plot.py.
"""
