"""Pre-training input pipeline in tf.data: sentence pairs, their index on disk, rows and masking."""
