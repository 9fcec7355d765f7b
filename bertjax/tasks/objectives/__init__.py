"""What a step computes: pure functions of model, parameters and batch."""
