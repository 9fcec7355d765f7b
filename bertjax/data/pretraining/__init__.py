"""Pre-training input pipeline with tf.data: sentence pairs, the pair index on disk, token rows and masking."""
