"""The one warning category of this package, so that a user can filter it."""

import warnings

import torch


class FullPayWarning(UserWarning):
    """Something works, but not as asked, or at a cost: the message says what and why."""


def warn(message: str) -> None:
    """Warn from the user's point of view. Not while compiling: a warning is no part of a graph."""
    if not torch.compiler.is_compiling():
        warnings.warn(message, FullPayWarning, stacklevel=3)
