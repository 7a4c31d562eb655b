"""`dakrun bench`: kernels beside what this machine's memory allows and what torch does.

Every kernel has a sweep (what to measure), cases, rows and the module that measures them, as in
gemm_sweep.py, gemm_cases.py, gemm_rows.py and gemm.py; the other modules serve all kernels.
"""
