"""BERT models as Flax modules and pure functions. They neither access files nor import TensorFlow."""
