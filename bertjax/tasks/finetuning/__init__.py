"""Base class, configuration, splits and predictions of fine-tuning tasks."""
