"""Reproduction of the paper's tables: training runs, and a comparison of our numbers with the paper's."""
