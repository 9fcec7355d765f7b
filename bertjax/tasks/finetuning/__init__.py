"""What fine-tuning tasks have in common."""
