"""Decoders: Hugging Face tensor names in, logits out."""
