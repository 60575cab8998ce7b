"""What goes beyond the six milestones: each package may be deleted, and none imports another."""
