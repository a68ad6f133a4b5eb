"""The one warning category of this package, so that a user can filter it."""


class FullPayWarning(UserWarning):
    """Something works, but not as asked, or at a cost: the message says what and why."""
