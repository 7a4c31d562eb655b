"""Planning: which share of each operand lives in which tier, and the speed that follows.

Pure Python: no torch, no GPU, no weights.
"""
