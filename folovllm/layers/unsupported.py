"""The error of models that are sound, and not built in."""


class UnsupportedModel(ValueError):
    """The model's configuration asks for something that no layer here has; the message names it."""
