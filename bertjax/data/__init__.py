"""Batches from a tokenized corpus or from the files of a task."""
