"""The measuring commands: bench/, probe/ (`dakrun profile`) and evaluate/, and their common parts.

Importing this folder imports no torch.
"""
