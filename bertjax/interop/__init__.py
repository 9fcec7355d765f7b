"""Other people's checkpoints."""
