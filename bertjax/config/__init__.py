"""Configs of runs: frozen dataclasses with types, limits and documentation, and how they are loaded."""
