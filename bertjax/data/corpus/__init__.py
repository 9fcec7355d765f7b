"""Text to a tokenized corpus on disk."""
