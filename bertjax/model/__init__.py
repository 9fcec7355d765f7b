"""Pure-functional Flax modules: no files, no TensorFlow."""
