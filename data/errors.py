"""Errors that a user can mend."""


class UserError(ValueError):
    """Bad input or settings: the message names the field or row, the reason and the remedy; never retried."""
