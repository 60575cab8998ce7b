"""The engine loop: requests in, scheduled steps, text out."""
