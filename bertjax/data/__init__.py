"""Input pipelines: corpus preparation, pre-training batches and fine-tuning batches."""
