"""Fine-tuning input pipeline in NumPy: reads task files, tokenizes examples and builds batches."""
