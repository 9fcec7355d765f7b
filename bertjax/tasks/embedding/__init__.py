"""Training and evaluation of text embedders, and sentence-transformers modules."""
