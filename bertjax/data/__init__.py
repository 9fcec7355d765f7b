"""From a tokenised corpus, or from a task's files, to batches."""
