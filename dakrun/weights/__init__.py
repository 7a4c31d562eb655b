"""Checkpoints: safetensors files read, norms folded, rows put into the tiers of a plan."""
