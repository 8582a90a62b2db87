"""Finite numbers in records, which a damaged file or a user's reward may hold among others."""

from collections.abc import Iterable
from statistics import fmean


def finite_number(value: object) -> float | None:
    """Return the value as a float if it is a finite number (and no bool), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def finite_numbers(values: Iterable[object]) -> list[float]:
    """Return the finite numbers among the values."""
    return [number for value in values if (number := finite_number(value)) is not None]


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
