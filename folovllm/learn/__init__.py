"""What exists for the course alone."""
