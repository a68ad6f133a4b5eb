"""Checks whose messages read "expected ..., got ..." and name the option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any


def wrong(option: str, expected: str, got: Any, hint: str = "") -> ValueError:
    """A ValueError that names the option, what is allowed and what came."""
    return ValueError(f"{option}: expected {expected}, got {got!r}." + (f" {hint}" if hint else ""))


def check_number(
    option: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
    finite: bool = True,
    per_head: bool = False,
) -> None:
    """Raise unless `value` is a real number (or, with `per_head`, a non-empty sequence of them) inside the interval.

    Raises:
        ValueError: naming the option, the interval and the value; NaN is never allowed.
    """
    left, right = "([{"[1 - open_low], ")]}"[1 - open_high]
    expected = f"a number in {left}{low:g}, {high:g}{right}" + (" or one such number per head" if per_head else "")
    if per_head and isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise wrong(option, expected, value)
        for entry in value:
            check_number(option, entry, low=low, high=high, open_low=open_low, open_high=open_high, finite=finite)
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(option, expected, value)
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    inside = (low < number if open_low else low <= number) and (number < high if open_high else number <= high)
    if math.isnan(number) or (finite and math.isinf(number)) or not inside:
        raise wrong(option, expected, value)


def check_count(option: str, value: Any, *, low: int = 1, high: int | None = None) -> None:
    """Raise unless `value` is an integer of at least `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise wrong(option, f"an integer of at least {low}" + (f" and at most {high}" if high else ""), value)


def check_choice(option: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise wrong(option, "one of " + ", ".join(repr(word) for word in allowed), value)


def check_flag(option: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise wrong(option, "True or False", value)
