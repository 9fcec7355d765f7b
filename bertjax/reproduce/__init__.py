"""The paper's tables: their runs, and the paper's numbers beside ours."""
