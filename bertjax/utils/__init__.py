"""Files, worker processes, logging and progress bars."""
