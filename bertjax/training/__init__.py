"""Training loop of all tasks, with checkpoints, metrics, multi-process runs and sweeps."""
