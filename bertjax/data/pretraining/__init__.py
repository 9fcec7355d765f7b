"""Pre-training batches: sentence pairs, the plan on disk, rows, masking; online, in tf.data."""
