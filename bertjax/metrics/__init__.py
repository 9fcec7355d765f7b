"""Evaluation metrics of the benchmarks, in NumPy."""
