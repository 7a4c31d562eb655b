"""The engine: requests in, completions out, over a model whose operands lie in several tiers."""
