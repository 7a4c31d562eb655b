"""Experts: the router's choice, and products grouped by expert.

reference.py has all of it in plain torch, route.py the router as a kernel.
"""
