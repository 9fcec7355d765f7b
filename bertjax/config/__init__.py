"""Configs of runs: frozen dataclasses with types, limits and documentation, and functions that load them."""
