"""Tasks: data, model head, loss and metrics. Each task family has one module."""
