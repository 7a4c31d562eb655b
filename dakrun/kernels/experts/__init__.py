"""Experts: the router's choice, and products grouped by expert.

reference.py has all of it in plain torch. route.py is the router as a kernel, grouped_splitk.py
products of few rows; dispatch.py launches them for a pass.
"""
