"""Training and evaluation of text embedders, and the modules of sentence-transformers."""
