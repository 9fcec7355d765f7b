"""Pre-training on a corpus, and continued pre-training of a checkpoint."""
