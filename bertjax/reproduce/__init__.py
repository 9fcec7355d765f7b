"""The paper's tables: its figures, the runs that stand behind each of them, and both side by side."""
