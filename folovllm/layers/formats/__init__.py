"""How linear layers keep their weights. Each format is one file."""
