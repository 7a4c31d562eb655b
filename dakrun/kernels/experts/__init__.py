"""Experts: the router's choice, and products grouped by expert.

reference.py has all of it in plain torch, route.py the router as a kernel. grouped_splitk.py
multiplies few rows, also in batches of matrices. For many, permute.py sorts them by expert and adds
up a row's experts, and grouped_tiled.py multiplies. dispatch.py holds their memory.
"""
