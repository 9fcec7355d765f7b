"""Models as Flax modules and pure functions, which use neither files nor TensorFlow."""
