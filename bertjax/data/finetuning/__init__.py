"""Fine-tuning data: text files to tokenized examples to batches, in NumPy."""
