"""The one exception type for wrong use."""


class ZeroError(ValueError):
    """Something was asked for that can't be right; the message names it and the way out."""
