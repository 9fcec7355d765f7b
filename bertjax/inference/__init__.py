"""Inference with trained models: masked words, embeddings, predictions, ensembles."""
