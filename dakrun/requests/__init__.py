"""Prompt files and results: rows in, rows out, the tokenizer between."""
