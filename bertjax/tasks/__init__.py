"""Training tasks, one module each. A task defines data, model head, loss and metrics."""
