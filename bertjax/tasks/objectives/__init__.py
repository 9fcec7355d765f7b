"""Objectives: model, loss and metrics of a training step as pure functions."""
