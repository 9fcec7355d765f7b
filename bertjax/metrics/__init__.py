"""Scores as the benchmarks define them: NumPy and strings, no JAX."""
