"""Frozen dataclasses for the configs of runs, and functions that load, check and document configs."""
