"""Fine-tuning examples: files of text, words and questions to rows of tokens; NumPy alone."""
