"""What a job costs, before and while it runs."""
