"""Training tasks. A task defines data, model head, loss and metrics."""
