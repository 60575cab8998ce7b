"""How a scheduled step reaches the device or devices."""
