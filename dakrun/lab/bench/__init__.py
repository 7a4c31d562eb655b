"""`dakrun bench`: kernels and models measured against this machine's memory bandwidth.

run.py goes from options to records. Cases to measure: kernel_sweep.py, model_sweep.py. Measuring:
kernel.py, model.py, drafts.py. The figures of models: model_rows.py, model_plot.py.
"""
