"""Objectives: model, loss and metrics of a step as pure functions."""
