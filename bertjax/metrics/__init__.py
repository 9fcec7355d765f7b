"""Evaluation metrics as the benchmarks define them, in NumPy."""
