"""What a job will do on TPUs that nobody has to hold."""
