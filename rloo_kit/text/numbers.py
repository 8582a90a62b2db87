"""Helpers that keep only finite numbers.

A damaged file may contain NaN, infinity or values of other types, and a user's reward function may
return them.
"""

from collections.abc import Iterable
from statistics import fmean


def finite_number(value: object) -> float | None:
    """Return the value as a float if it is a finite int or float, else None.

    Return None also for a bool, and for a number whose magnitude is 1e300 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def finite_numbers(values: Iterable[object]) -> list[float]:
    """Return the finite numbers among the values."""
    return [number for value in values if (number := finite_number(value)) is not None]


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if every value is None."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
