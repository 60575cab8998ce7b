"""The records that the scheduler and the devices exchange. Each could be written to a file."""
