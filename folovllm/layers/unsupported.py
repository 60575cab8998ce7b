"""The error for a valid model that this package has not built in."""


class UnsupportedModel(ValueError):
    """The model's configuration asks for something that no layer here has. The message names it."""
