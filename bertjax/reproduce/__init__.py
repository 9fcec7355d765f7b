"""Reproduction of the paper's tables: their runs, and comparison of the paper's numbers with ours."""
