"""Objectives of train steps: each defines a model, its loss and its metrics, computed by pure functions."""
