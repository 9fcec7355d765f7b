"""Everything that differs between tasks, one file a task family."""
