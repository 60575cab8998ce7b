"""How linear layers keep their weights: a format a file."""
