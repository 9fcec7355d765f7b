"""Flax modules and pure functions. They use neither files nor TensorFlow."""
