"""BERT pre-training and fine-tuning in JAX and Flax, built for TPUs."""
