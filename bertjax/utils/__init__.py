"""Files, logging and progress bars."""
