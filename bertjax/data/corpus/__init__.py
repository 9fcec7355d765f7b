"""Conversion of text to a tokenized corpus on disk."""
