"""`dakrun bench`: kernels and models beside what this machine's memory allows.

Every kernel has a sweep (what to measure), cases, rows and the module that measures them, as in
gemm_sweep.py, gemm_cases.py, gemm_rows.py and gemm.py; so have models, but for the cases, which are
plans. The other modules serve all.
"""
