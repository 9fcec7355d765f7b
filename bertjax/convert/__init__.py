"""Conversion between bertjax, Hugging Face and google-research/bert checkpoints."""
