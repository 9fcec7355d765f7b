"""Use of trained models: masked words, embeddings, predictions, ensembles."""
