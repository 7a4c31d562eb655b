"""Decode attention over a KV cache in several tiers: SplitK_FlashAttn."""
