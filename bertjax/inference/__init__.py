"""What is asked of a trained model: masked words, embeddings, predictions."""
