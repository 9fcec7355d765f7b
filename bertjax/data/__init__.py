"""From a tokenised corpus to batches: online, in tf.data."""
