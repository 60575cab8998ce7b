"""What travels between the scheduler and the devices: values that could as well be written to a file."""
