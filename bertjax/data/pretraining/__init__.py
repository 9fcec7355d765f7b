"""Pre-training batches: sentence pairs, the pair index, rows and masking, in tf.data."""
